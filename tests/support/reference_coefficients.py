"""Coefficient tables typed from the publications: rows (a, b, c) of one iteration step.

A row stands for X <- a X + b (X X^H) X + c (X X^H)^2 X. Imports neither JAX nor the package.
"""

import numpy as np

# Jordan et al. 2024 (kellerjordan.github.io/posts/muon); paper, appendix D.1: one row, repeated.
JORDAN = [(3.4445, -4.7750, 2.0315)]

# You Jiacheng; paper, appendix D.2: six rows, of which Muon+ uses the first five.
YOU = [
    (3955 / 1024, -8306 / 1024, 5008 / 1024),
    (3735 / 1024, -6681 / 1024, 3463 / 1024),
    (3799 / 1024, -6499 / 1024, 3211 / 1024),
    (4019 / 1024, -6385 / 1024, 2906 / 1024),
    (2677 / 1024, -3029 / 1024, 1162 / 1024),
    (2172 / 1024, -1833 / 1024, 682 / 1024),
]

# Amsel et al. 2025, arXiv 2505.16932, listing 1; paper, appendix D.3: before the safety factor.
POLAR_EXPRESS_AS_PRINTED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
# The same listing divides every row but the last one by 1.01, 1.01^3 and 1.01^5, and normalizes the
# matrix to norm 1/1.01.
POLAR_EXPRESS = [
    (a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS_AS_PRINTED[:-1]
] + POLAR_EXPRESS_AS_PRINTED[-1:]

# You Jiacheng's five rows used by Dion (microsoft/dion) and by optax.contrib.muon as "dion".
DION = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]

# Huang 2026, arXiv 2606.00371: five steps of degree 3, as NVIDIA's code rounds them. Its safety
# factor of 1.01 on the norm is this package's. Later rows continue them, see `cubic`.
CUBIC = [
    (3.3656576, -3.3420992),
    (2.5744352, -1.4957376),
    (2.5368962, -1.4312570),
    (2.4418906, -1.2764040),
    (2.2230472, -0.9630650),
]
SAFETY = {"polar_express": 1.01, "cubic": 1.01}  # times the norm

TABLES = {
    "jordan": JORDAN,
    "you": YOU,
    "polar_express": POLAR_EXPRESS,
    "dion": DION,
}


def coefficient_rows(table, steps):
    """The ``steps`` rows that an iteration uses; ``table`` is a name, one triple or rows."""
    if table == "cubic":
        return [(a, b, 0.0) for a, b in cubic(steps)]
    rows = TABLES[table] if isinstance(table, str) else table
    if np.ndim(rows) == 1:
        rows = [rows]
    if len(rows) == 1 or table == "polar_express":  # these repeat their last row
        rows = list(rows) + [rows[-1]] * steps
    assert len(rows) >= steps, f"{table!r} has {len(rows)} rows, {steps} were asked for"
    return rows[:steps]


def cubic(steps):
    """The printed rows, then the closest to 1 on what the printed ones leave of [7e-3, 1]."""
    rows, low, high = list(CUBIC), 7e-3, 1.3
    for a, b in CUBIC:
        low = a * low + b * low**3
    while len(rows) < steps:
        a, b = closest_cubic(low, high)
        rows.append((a, b))
        low = a * low + b * low**3
        high = 2 - low
    return rows[:steps]


def closest_cubic(low, high):
    """``(a, b)`` for which ``a x + b x^3`` is closest to 1 on ``[low, high]``, in closed form.

    The error is -E, E, -E at low, at the largest value and at high (Chen and Chow 2014; Amsel et
    al. 2025, section 3): p(low) = p(high) gives a / -b, and p(low) and the largest
    have the mean 1.
    """
    square = (low**2 + low * high + high**2) / 3  # where the largest value is
    top, ends = 2 / 3 * square**0.5, low - low**3 / (3 * square)
    a = 2 / (top + ends)
    return a, -a / (3 * square)
