"""Matrices on a mesh: pack, work, return."""
