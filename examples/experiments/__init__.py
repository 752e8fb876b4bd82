"""What compares optimizers: sweeps of runs, and the figures of the paper."""
