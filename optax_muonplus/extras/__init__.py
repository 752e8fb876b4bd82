"""Features of rare use, each in a file that needs none of the others."""
