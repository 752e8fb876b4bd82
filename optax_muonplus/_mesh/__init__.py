"""Matrices that lie in shards on a mesh: planned before tracing, then moved and worked on."""
