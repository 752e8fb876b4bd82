"""Names of the measures of imbalance, and their evaluation at each stage of a matrix.

A stage is the matrix after one of the steps from gradient to update. The step from the first stage
to the second, as a rule the polar one, is what rank correlations and distances are about.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus.diagnostics._imbalance import (
    floor_share,
    norm_ratio,
    norm_variance,
    polar_distance,
    rms,
    spearman,
)
from optax_muonplus.matrices import Norm, Side, normalize_matrix, normalized_sides

Measure = Literal[
    "row_variance",
    "col_variance",
    "row_ratio",
    "col_ratio",
    "rms",
    "row_spearman",
    "col_spearman",
    "row_floor_share",
    "col_floor_share",
    "distance",
]
# The measures that are recorded by default: all but the distance, which takes a singular value
# decomposition of every matrix.
MEASURES: tuple[Measure, ...] = get_args(Measure)[:-1]
# Measures of a single matrix are taken at every stage, the others only at the second one.
_AT_EVERY_STAGE = ("row_variance", "col_variance", "row_ratio", "col_ratio", "rms")


def check_measures(measures: Sequence[str]) -> None:
    """Raises ValueError, which lists the names, unless ``measures`` is a sequence of them."""
    names = get_args(Measure)
    if isinstance(measures, str) or any(name not in names for name in measures):
        raise ValueError(f"measures={measures!r} must be a sequence of names, of {names}.")


def measures_by_stage(
    stages: Sequence[str], measures: Sequence[Measure]
) -> dict[str, tuple[Measure, ...]]:
    """The names of the measures that are taken at each stage."""
    return {
        stage: tuple(name for name in measures if name in _AT_EVERY_STAGE or stage == stages[1])
        for stage in stages
    }


def measure(
    arrays: Mapping[str, jax.Array],
    stages: Sequence[str],
    measures: Sequence[Measure],
    norm: Norm = "none",
    norm_eps: ArrayLike = 0.0,
) -> dict[str, dict[str, jax.Array]]:
    """Measures matrices at each stage.

    Args:
      arrays: the matrices ``(*batch, out, in)`` by stage, all of one shape.
      stages: names of the stages, in order. (The order of ``arrays`` is lost in JAX, which sorts
        dictionaries by key.)
      measures: names of measures.
      norm: the normalization after the second stage, for the floor shares.
      norm_eps: as in that normalization.

    Returns:
      Arrays ``(*batch,)`` in float32, by stage and by measure.
    """
    before, after = (arrays[stage] for stage in stages[:2])

    def evaluate(name: Measure, x: jax.Array) -> jax.Array:
        side: Side = "row" if name.startswith("row") else "col"
        match name:
            case "row_variance" | "col_variance":
                return norm_variance(x, side)
            case "row_ratio" | "col_ratio":
                return norm_ratio(x, side)
            case "rms":
                return rms(x)
            case "row_spearman" | "col_spearman":
                return spearman(before, after, side)
            case "row_floor_share" | "col_floor_share":
                return _floor_share_before_norm(after, side, norm, norm_eps)
            case "distance":
                return polar_distance(after, before)

    return {
        stage: {name: evaluate(name, arrays[stage]).astype(jnp.float32) for name in names}
        for stage, names in measures_by_stage(stages, measures).items()
    }


def _floor_share_before_norm(
    x: jax.Array, side: Side, norm: Norm, norm_eps: ArrayLike
) -> jax.Array:
    """The floor share of ``side`` just before ``norm`` normalizes that side; NaN if it does not."""
    for normalized in normalized_sides(norm):
        if normalized == side:
            return floor_share(x, side, norm_eps)
        x = normalize_matrix(x, normalized, norm_eps)
    return jnp.full(x.shape[:-2], jnp.nan)
