"""A leaf as a batch of matrices: its layout, record, placement on a mesh, and path."""
