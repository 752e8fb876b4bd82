"""The matrix products of an update, by their shapes."""

import collections
import math
from typing import Literal

import jax

import optax_muonplus as omp
from lab.benchmarks import trees


def matrix_shapes(size: trees.Size) -> collections.Counter[tuple[int, int]]:
    """Counts the matrices of each shape that the parameters have."""
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for leaf in jax.tree.leaves(trees.shapes(size)):
        if len(leaf.shape) > 1:
            counts[leaf.shape[-2:]] += math.prod(leaf.shape[:-2])
    return counts


def operations(
    size: trees.Size, polar: Literal["auto", "newton_schulz"], compute_dtype: str | None
) -> int:
    """Counts multiplications and additions that five steps with the default coefficients take.

    Args:
      size: of the model.
      polar: as in :func:`optax_muonplus.muonplus`.
      compute_dtype: as there.
    """
    options = omp.polar.Orthogonalize(polar=polar, compute_dtype=compute_dtype)
    factor = omp.polar.FastPolar(options)
    return sum(count * factor.flops(shape) for shape, count in matrix_shapes(size).items())
