"""A trainer built on the public names of `optax_muonplus`; run as `python -m examples.train`.

The modules here are commands and scripts to read; the rest is in packages. Imports between packages
run one way: each package imports only from those before it, and commands from all of them.

    system, compiled, settings, models, data, training, forecast, runs, parity, inference,
    sweeps, paper, hosts
"""
