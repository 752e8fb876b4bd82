"""Matrices of hard spectra, and the iteration with a rounding after each product."""

import numpy as np

import optax_muonplus as omp


def matrix(spectrum, n=48, m=160):
    x = np.random.default_rng(0).standard_normal((n, m))
    if spectrum != "gaussian":
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        values = {
            "equal": np.ones(n),
            "pairs": np.repeat(np.linspace(1, 0.1, (n + 1) // 2), 2)[:n],
            "log": np.logspace(0, -3, n),
            "log to 1e-7": np.logspace(0, -7, n),
            "rank 10": np.arange(n) < 10,
            "two large": np.r_[1, 0.5, np.logspace(-4, -7, n - 2)],
        }
        x = (u * values[spectrum]) @ vt
    return x.astype(np.float32)


def polynomial(x, table, steps, rounded=lambda x: x):
    """The iteration in float64, with operands and products passed through ``rounded``."""
    rows, _, safety_factor, *_ = omp.coefficients.for_steps(table, steps)
    y = rounded(np.asarray(x, np.float64))
    gram = rounded(y @ y.T)
    scale = 1 / (safety_factor * np.sqrt(np.trace(gram)))
    gram = rounded(gram * scale**2)
    for i, row in enumerate(rows):
        p, power = row[0] * np.eye(len(y)) + row[1] * gram, gram
        for c in row[2:]:
            power = rounded(gram @ power)
            p = p + c * power
        y = rounded(rounded(p * scale if i == 0 else p) @ y)
        gram = rounded(y @ y.T)
    return y
