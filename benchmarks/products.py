"""The matrix products of an update: how many there are, and how long they take on their own."""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_muonplus as omp
from benchmarks import trees

# Rows, inner dimension, columns.
Product = tuple[int, int, int]

_CHAINED = 8  # products in one turn of a loop, so that the loop's own copies do not count
_TURNS = 4


def matrix_shapes(size: trees.Size) -> collections.Counter[tuple[int, int]]:
    """How many matrices of each shape the parameters have."""
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for leaf in jax.tree.leaves(trees.shapes(size)):
        if len(leaf.shape) > 1:
            counts[leaf.shape[-2:]] += math.prod(leaf.shape[:-2])
    return counts


def needed(
    size: trees.Size, polar: Literal["auto", "newton_schulz"], compute_dtype: str | None
) -> collections.Counter[Product]:
    """How many of each product five steps with the default coefficients take for all matrices.

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
    """Multiplications and additions."""
    return sum(2 * math.prod(product) * count for product, count in products.items())


# Bytes of a stack of matrices that an accelerator works on at a time.
STACK_BYTES = 2**27


class Chain(NamedTuple):
    """A program of nothing but products, and how many of each it does."""

    run: Callable[[], jax.Array]
    products: dict[Product, int]


def chains(size: trees.Size, dtype: str) -> dict[str, Chain]:
    """A chain for each shape of matrices, stacked as the update stacks them."""
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for shape, count in matrix_shapes(size).items():
        counts[min(shape), max(shape)] += count
        counts[min(shape), min(shape)] += 0  # of the Gram iteration, if no matrix is square
    result = {}
    for (n, m), count in counts.items():
        batch = 1
        if jax.default_backend() != "cpu":
            batch = max(1, min(count, STACK_BYTES // (4 * n * m)))
        result[f"product {n} {m}"] = chain(n, m, dtype, batch)
    return result


def chain(n: int, m: int, dtype: Any, batch: int = 1) -> Chain:
    """Products of (n, n) with (n, m).

    For m > n the chain alternates the two products of a Newton-Schulz step, ``R = X X^T`` and
    ``R X``. Rows of X are orthonormal, so that the result neither grows nor shrinks.
    """
    shape = (m, n) if batch == 1 else (batch, m, n)
    x = jnp.linalg.qr(jax.random.normal(jax.random.key(0), shape))[0].mT.astype(dtype)

    def turn(_: Any, y: jax.Array) -> jax.Array:
        for _ in range(_CHAINED):
            y = y @ x if m == n else (y @ x.mT) @ x
        return y

    program = jax.jit(lambda x: jax.lax.fori_loop(0, _TURNS, turn, x))
    times = batch * _CHAINED * _TURNS
    products = {(n, n, n): times} if m == n else {(n, m, n): times, (n, n, m): times}
    return Chain(lambda: program(x), products)


def seconds_of_each(
    chains: Mapping[str, Chain], seconds: Mapping[str, np.ndarray]
) -> dict[Product, float]:
    """Median seconds of each product.

    The two products of a chain take the same number of operations, and are given the same time.
    """
    return {
        product: float(np.median(seconds[name])) / sum(chain.products.values())
        for name, chain in chains.items()
        for product in chain.products
    }
