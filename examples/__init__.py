"""Scripts to copy, commands, and the packages that the commands use.

A script to copy imports none of these packages. A package imports only those on lines above its
own, or to its left; `tests/documentation/test_houses.py` reads the lines.

    trainer: system, settings, models, data, weights, training, runs, parity, inference
    compiled_programs: .
    experiments: theory, sweeps
"""
