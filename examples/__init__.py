"""Trainers built on the public names of `optax_muonplus`; run as `python -m examples.train`."""
