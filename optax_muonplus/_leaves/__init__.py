"""A leaf as a batch of matrices: layout, record, placement on a mesh, paths."""
