"""One run: its folder, its checkpoints, its training loop, and what is reported of it."""
