"""Scripts to copy, commands, and the packages that the commands use."""
