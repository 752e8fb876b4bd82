"""States of optimizers taken over by others."""
