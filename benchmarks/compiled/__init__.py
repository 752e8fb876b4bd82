"""What one device does in a compiled program, read from the text of the program."""
