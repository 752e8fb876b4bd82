"""The numbers of plain.py, fast: the polar factor, one device, a mesh."""
