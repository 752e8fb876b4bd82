"""One device: what a CPU, a GPU and a TPU want, each in the file of its name."""
