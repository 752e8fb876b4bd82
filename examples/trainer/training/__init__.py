"""Training as functions: optimizers, sharding, loss, one step, evaluation, and their setup."""
