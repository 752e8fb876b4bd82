"""Which parameter is a matrix, its layout and its sharding."""
