"""What one device does in a compiled program, and how to compile for devices that are not there."""
