"""The same update as `optax.contrib.muon`, and how far two updates are apart."""

from typing import Any

import jax
import numpy as np

AS_OPTAX: dict[str, Any] = {"shape_scale": "max", "nesterov": True, "bias_correction": True}
"""Options of ``optax_muonplus.muon`` that give Optax's update."""


def largest_difference(ours: Any, theirs: Any, labels: Any) -> float:
    """Largest relative distance between two updates of one matrix."""

    def norm(x: jax.Array) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float32)))

    leaves = (jax.tree.leaves(tree) for tree in (ours, theirs, labels))
    return max(
        norm(a - b) / norm(b) for a, b, label in zip(*leaves, strict=True) if label == "muon"
    )
