"""The paper's theory in 100 digits and float64 NumPy: the oracle of `test_theory.py`.

Like `reference` it imports neither JAX nor the package. Maps are in 100 decimal digits, so that
their end points can be certified; Lemma 1 is from the moments of a unit vector; Hessian blocks are
cut out of a dense matrix.
"""

import decimal
from decimal import Decimal

import numpy as np

# --- g and g' ------------------------------------------------------------------------------------


# Five steps multiply errors by 1e6 at most: of 100 digits more than 90 stay.
decimal.getcontext().prec = 100


def value_and_slope(rows, lam):
    """G and G' at a number, by g = lam P^2 and g' = P^2 + 2 lam P P'."""
    value, slope = Decimal(lam), Decimal(1)
    for row in rows:
        row = [Decimal(c) for c in row]
        p = sum(c * value**k if k else c for k, c in enumerate(row))
        dp = sum(k * c * (value ** (k - 1) if k > 1 else 1) for k, c in enumerate(row) if k)
        slope *= p * p + 2 * value * p * dp
        value = value * p * p
    return value, slope


# --- Lemma 1 -------------------------------------------------------------------------------------


def expected_variance(alpha, n):
    """E Var(s) for s_i = sum_k alpha_k u_ik^2, from the moments of a uniform unit vector in R^n."""
    alpha = np.concatenate([alpha, np.zeros(n - len(alpha))])
    moments = (np.ones((n, n)) + 2 * np.eye(n)) / (n * (n + 2))  # E[u_k^2 u_l^2]
    return alpha @ moments @ alpha - (alpha.sum() / n) ** 2


# --- Hessian blocks ------------------------------------------------------------------------------


def block_norms(hessian, blocks):
    """Spectral norms of the principal blocks whose places ``blocks`` lists, row by row."""
    return np.array([np.abs(np.linalg.eigvalsh(hessian[np.ix_(b, b)])).max() for b in blocks])
