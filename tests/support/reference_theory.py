"""The paper's theory in 100 digits, fractions and float64 NumPy: the oracle of test_theory.

Like `reference` it imports neither JAX nor the package. Maps are in 100 decimal digits, so that
their end points can be certified, and expanded in fractions, so that their crossings can be
counted; Lemma 1 is from the moments of a unit vector; Hessian blocks are cut out of a dense matrix.
"""

import decimal
import itertools
from decimal import Decimal
from fractions import Fraction

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


def quintic_slope(row):
    """g' of (a, b, c), expanded by hand, highest power first."""
    a, b, c = row
    return [5 * c * c, 8 * b * c, 3 * (b * b + 2 * a * c), 4 * a * b, a * a]


def ends(row, upper=1.0):
    """Where |g'| of one quintic step is 1 between 0 and ``upper``, by companion matrices."""
    found = []
    for level in (1, -1):
        polynomial = np.array(quintic_slope(row), dtype=np.float64)
        polynomial[-1] -= level
        roots = np.roots(polynomial)
        found += [r.real for r in roots if abs(r.imag) < 1e-9 and 0 < r.real < upper]
    return np.sort(found)


# --- Sturm's count of real roots, in fractions, lowest power first -------------------------------


def times(p, q):
    product = [Fraction(0)] * (len(p) + len(q) - 1)
    for i, x in enumerate(p):
        for j, y in enumerate(q):
            product[i + j] += x * y
    return product


def plus(p, q):
    long, short = (p, q) if len(p) >= len(q) else (q, p)
    return [x + (short[i] if i < len(short) else 0) for i, x in enumerate(long)]


def derivative(p):
    return [k * c for k, c in enumerate(p)][1:]


def expanded(rows):
    """G as one polynomial."""
    value = [Fraction(0), Fraction(1)]
    for row in rows:
        row = [Fraction(c) for c in row]
        p, power = [row[0]], [Fraction(1)]
        for c in row[1:]:
            power = times(power, value)
            p = plus(p, [c * x for x in power])
        value = times(value, times(p, p))
    return value


def at(p, x):
    return sum(c * Fraction(x) ** k for k, c in enumerate(p))


def remainder(p, q):
    p = list(p)
    while len(p) >= len(q):
        factor = p[-1] / q[-1]
        for i, c in enumerate(q):
            p[len(p) - len(q) + i] -= factor * c
        p.pop()
    while p and p[-1] == 0:
        p.pop()
    return p


def count_roots(p, low, high):
    """Distinct real roots in (low, high], by Sturm's theorem."""
    chain = [p, derivative(p)]
    while chain[-1]:
        rest = [-c for c in remainder(chain[-2], chain[-1])]
        # Only signs matter: smaller numbers keep the fractions short.
        largest = max((abs(c) for c in rest), default=1)
        chain.append([c / largest for c in rest])

    def changes(x):
        signs = [value > 0 for q in chain if q and (value := at(q, x)) != 0]
        return sum(a != b for a, b in itertools.pairwise(signs))

    return changes(low) - changes(high)


# --- Lemma 1 -------------------------------------------------------------------------------------


def expected_variance(alpha, n):
    """E Var(s) for s_i = sum_k alpha_k u_ik^2, from the moments of a uniform unit vector in R^n."""
    alpha = np.concatenate([alpha, np.zeros(n - len(alpha))])
    moments = (np.ones((n, n)) + 2 * np.eye(n)) / (n * (n + 2))  # E[u_k^2 u_l^2]
    return alpha @ moments @ alpha - (alpha.sum() / n) ** 2


def exact_shift(lam, rows, n):
    """Lemma 1 in 100 digits: the equation before its step 3, squares and sums as they stand."""
    lam = [Decimal(float(x)) for x in lam]
    mapped = [value_and_slope(rows, x)[0] for x in lam]

    def spread(x):
        return n * sum(v * v for v in x) - sum(x) ** 2

    return float(2 * (spread(mapped) - spread(lam)) / (n * n * (n + 2)))


# --- Hessian blocks ------------------------------------------------------------------------------


def block_norms(hessian, blocks):
    """Spectral norms of the principal blocks whose places ``blocks`` lists, row by row."""
    return np.array([np.abs(np.linalg.eigvalsh(hessian[np.ix_(b, b)])).max() for b in blocks])
