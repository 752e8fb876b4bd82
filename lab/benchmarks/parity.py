"""Forms of Muon+ by their arguments, and the distance of two updates."""

from typing import Any

import jax
import numpy as np

AS_OPTAX: dict[str, Any] = {"shape_scale": "max", "bias_correction": True}
"""Options of ``optax_muonplus.muon`` that give the update of `optax.contrib.muon`."""

COL_ROW: dict[str, Any] = {"norm": "col_row", "match_frobenius": False}
"""The norm of the paper, where the default has ``row_col`` and keeps the Frobenius norm."""


def distance(found: Any, expected: Any) -> float:
    """Returns how far two arrays are apart, in the Frobenius norm, relative to the second."""
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def largest_difference(ours: Any, theirs: Any, labels: Any) -> float:
    """Returns the largest relative distance between two updates of one matrix."""
    leaves = (jax.tree.leaves(tree) for tree in (ours, theirs, labels))
    return max(distance(a, b) for a, b, label in zip(*leaves, strict=True) if label == "muon")
