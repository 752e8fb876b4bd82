"""A result for track 3 of modded-nanogpt: Muon+ in PyTorch, in one file."""
