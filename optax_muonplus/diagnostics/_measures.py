"""The words for measures of imbalance, and all that are asked for of a few stages of one matrix.

A stage is what a matrix has become on its way from gradient to update. From the first stage to the
second leads the step, as a rule the polar one, that rank correlations and distances are about.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from optax_muonplus.diagnostics._imbalance import (
    floor_share,
    norm_ratio,
    norm_variance,
    polar_distance,
    rms,
    spearman,
)
from optax_muonplus.matrices._normalization import Norm, Side, normalize_matrix, normalized_sides

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
# All but the distance, which takes a singular value decomposition of every matrix.
MEASURES: tuple[Measure, ...] = get_args(Measure)[:-1]
_OF_EVERY_STAGE = ("row_variance", "col_variance", "row_ratio", "col_ratio", "rms")


def check_measures(measures: Any) -> None:
    """Raises ValueError, with the known words, unless ``measures`` is a sequence of them."""
    known = get_args(Measure)
    if isinstance(measures, str) or any(word not in known for word in measures):
        raise ValueError(f"measures={measures!r} must be a sequence of words, of {known}.")


def measured_words(
    stages: Sequence[str], measures: Sequence[Measure]
) -> dict[str, tuple[Measure, ...]]:
    """The measures of each stage: what is not of every stage is kept with the second."""
    return {
        stage: tuple(word for word in measures if word in _OF_EVERY_STAGE or stage == stages[1])
        for stage in stages
    }


def measure(
    arrays: Mapping[str, jax.Array],
    stages: Sequence[str],
    measures: Sequence[Measure],
    norm: Norm = "none",
    norm_eps: Any = 0.0,
) -> dict[str, dict[str, jax.Array]]:
    """By stage and measure, one float32 number for each matrix.

    Args:
      arrays: for each stage ``(*batch, out, in)``, of one shape.
      stages: their names, in order; JAX hands on dictionaries sorted by name.
      measures: see :data:`Measure`.
      norm: the normalization that follows the second stage, for the floor shares.
      norm_eps: its floor.

    Returns:
      Arrays ``(*batch,)``.
    """
    before, after = (arrays[stage] for stage in stages[:2])

    def number(word: Measure, x: jax.Array) -> jax.Array:
        side: Any = word.partition("_")[0]
        match word:
            case "row_variance" | "col_variance":
                return norm_variance(x, side)
            case "row_ratio" | "col_ratio":
                return norm_ratio(x, side)
            case "rms":
                return rms(x)
            case "row_spearman" | "col_spearman":
                return spearman(before, after, side)
            case "row_floor_share" | "col_floor_share":
                return _floor_share_in_turn(after, side, norm, norm_eps)
            case "distance":
                return polar_distance(after, before)

    return {
        stage: {word: number(word, arrays[stage]).astype(jnp.float32) for word in words}
        for stage, words in measured_words(stages, measures).items()
    }


def _floor_share_in_turn(x: jax.Array, side: Side, norm: Norm, norm_eps: Any) -> jax.Array:
    """As it is when the turn of that side comes; NaN if it is not normalized."""
    for turn in normalized_sides(norm):
        if turn == side:
            return floor_share(x, side, norm_eps)
        x = normalize_matrix(x, turn, norm_eps)  # ty: ignore[invalid-argument-type]
    return jnp.full(x.shape[:-2], jnp.nan)
