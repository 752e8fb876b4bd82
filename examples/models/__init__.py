"""Models, one file each, readable on their own."""
