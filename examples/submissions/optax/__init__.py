"""Reports on `optax.contrib.muon`: what each says, and a test that fails on the installed Optax."""
