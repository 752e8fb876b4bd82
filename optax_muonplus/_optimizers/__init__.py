"""Optimizers of whole models: a chain of links for the matrices, AdamW for everything else."""
