"""Coefficient rows, end points of regions and spectra that tests of the theory share."""

import itertools

import numpy as np

PAPER = (2, -1.5, 0.5)
# A name or row as the package takes it, and how many steps.
COMPOSED = [
    (name, t) for name in ("jordan", "you", "dion", "polar_express", "cans") for t in (2, 5)
]
COMPOSED += [(PAPER, 5), (PAPER, 12), ((1.5, -0.5), 6), ((2.1875, -2.1875, 1.3125, -0.3125), 4)]


def interior_ends(regions):
    """End points inside, after a check that the regions alternate and fill [0, 1]."""
    tagged = [(span, "+") for span in regions.amplification]
    tagged += [(span, "-") for span in regions.reduction]
    tagged.sort()
    spans = [span for span, _ in tagged]
    assert spans[0][0] == 0 and spans[-1][1] == 1
    for (left, a), (right, b) in itertools.pairwise(tagged):
        assert left[1] == right[0] and a != b
    return np.array([span[1] for span in spans[:-1]])


def spectra(n):
    rng = np.random.default_rng(n)
    raw = [rng.uniform(0, 1, n), np.logspace(0, -3, n), rng.uniform(0, 1, n) ** 5]
    return [s / np.linalg.norm(s) for s in raw] + [rng.uniform(0, 1, n)]
