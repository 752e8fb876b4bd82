"""The matrix products of an update, by their shapes."""

import collections
import math
from collections.abc import Mapping
from typing import Literal

import jax

import optax_muonplus as omp
from benchmarks import trees

# Rows, inner dimension, columns.
Product = tuple[int, int, int]


def matrix_shapes(size: trees.Size) -> collections.Counter[tuple[int, int]]:
    """Counts the matrices of each shape that the parameters have."""
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for leaf in jax.tree.leaves(trees.shapes(size)):
        if len(leaf.shape) > 1:
            counts[leaf.shape[-2:]] += math.prod(leaf.shape[:-2])
    return counts


def needed(
    size: trees.Size, polar: Literal["auto", "newton_schulz"], compute_dtype: str | None
) -> collections.Counter[Product]:
    """Counts each product that five steps with the default coefficients take for all matrices.

    Args:
      size: of the model.
      polar: as in :func:`optax_muonplus.muonplus`.
      compute_dtype: as there.
    """
    products: collections.Counter[Product] = collections.Counter()
    for shape, count in matrix_shapes(size).items():
        options = omp.polar.Orthogonalize(polar=polar, compute_dtype=compute_dtype)
        for product in omp.polar.matmul_shapes(shape, options):
            products[product] += count
    return products


def flops(products: Mapping[Product, int]) -> int:
    """Counts multiplications and additions."""
    return sum(2 * math.prod(product) * count for product, count in products.items())
