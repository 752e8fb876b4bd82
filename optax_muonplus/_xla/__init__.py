"""Ways to write a program that make XLA compile it well, each under the name of what it is for."""
