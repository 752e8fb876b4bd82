"""How matrices are worked on by one device: a file each for CPUs, GPUs and TPUs."""
