"""Muon+ against the best Muon: which runs there are, and what is decided by them."""
