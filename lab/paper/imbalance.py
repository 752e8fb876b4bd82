r"""Computes how unequal the rows and columns of matrices ``(*batch, out, in)`` are.

A row holds the weights of one output unit, a column those of one input feature. The command
``python -m lab.paper.imbalance`` follows a random matrix of each shape from the momentum to
the update. Polar factors amplify the variance of norms and keep some of their order; a
normalization takes the variance away.

Source: the sections "Update Imbalance Caused by Muon's Polar Iterations" and "Positive Correlation
Before and After the Polar Step".
"""

import sys
from typing import Literal

import jax
import jax.numpy as jnp

import optax_muonplus as omp
from lab.sweeps.results import markdown

Side = Literal["row", "col"]
SHAPES = ((128, 128), (341, 128), (128, 341))  # of attention, gate and up, down in a small LLaMA


def squared_norms(x: jax.Array, side: Side = "row") -> jax.Array:
    """Computes the squared l2 norms of rows ``(*batch, out)``, or of columns ``(*batch, in)``."""
    x = jnp.asarray(x)
    wide = jnp.promote_types(jnp.float32, x.real.dtype)
    return jnp.sum(jnp.square(jnp.abs(x).astype(wide)), axis=-1 if side == "row" else -2)


def norm_variance(x: jax.Array, side: Side = "row") -> jax.Array:
    r"""Computes the paper's imbalance, the variance of squared norms.

    .. math::
      \mathrm{Var}(s(X)) = \frac1m \sum_{i=1}^m \Bigl( \|X_{i:}\|_2^2 - \frac1m \|X\|_F^2 \Bigr)^2

    It grows with the fourth power of X, and compares matrices of one size only.
    """
    return jnp.var(squared_norms(x, side), axis=-1)


def relative_variance(x: jax.Array, side: Side = "row") -> jax.Array:
    """Divides :func:`norm_variance` by the squared mean, which no factor changes."""
    squares = squared_norms(x, side)
    return jnp.var(squares / jnp.mean(squares, axis=-1, keepdims=True), axis=-1)


def norm_ratio(x: jax.Array, side: Side = "row") -> jax.Array:
    """Divides the largest norm by the smallest: infinite if some are zero, NaN if all are."""
    squares = squared_norms(x, side)
    return jnp.sqrt(jnp.max(squares, axis=-1) / jnp.min(squares, axis=-1))


def spearman(x: jax.Array, y: jax.Array, side: Side = "row") -> jax.Array:
    r"""Computes the rank correlation of the norms of X and Y (equation "spearman_def").

    .. math::
      \rho = \mathrm{Corr}(\mathrm{rank}(\|X_{1:}\|, \dots, \|X_{m:}\|), \\
      \mathrm{rank}(\|Y_{1:}\|, \dots, \|Y_{m:}\|))

    Equal norms share the mean of their ranks. It is NaN if all norms of a matrix are equal. Norms
    that differ by rounding alone, as those of normalized rows do, have ranks without a meaning.
    """
    a, b = (_centred_ranks(squared_norms(matrix, side)) for matrix in (x, y))
    size = jnp.sqrt(jnp.sum(a * a, axis=-1)) * jnp.sqrt(jnp.sum(b * b, axis=-1))
    return jnp.clip(jnp.sum(a * b, axis=-1) / size, -1, 1)


def _centred_ranks(values: jax.Array) -> jax.Array:
    """Ranks along the last axis, less their mean."""
    each, others = values[..., :, None], values[..., None, :]
    below, equal = (
        jnp.sum(x, axis=-1, dtype=values.dtype) for x in (others < each, others == each)
    )
    return below + (equal + 1) / 2 - (values.shape[-1] + 1) / 2


def stages(momentum: jax.Array) -> dict[str, jax.Array]:
    """The momentum over its Frobenius norm, its polar factor after five steps, and the update."""
    size = jnp.sqrt(jnp.sum(jnp.square(momentum), axis=(-2, -1), keepdims=True))
    factor = omp.polar.polar_factor(momentum)
    return {
        "momentum": momentum / size,
        "polar factor": factor,
        "after row_col": omp.matrices.Normalize("row_col", match_frobenius=False)(factor),
    }


def main() -> None:
    """Prints a line for each shape, stage and side."""
    rows = []
    for shape in SHAPES:
        keys = jax.random.split(jax.random.key(0))
        sizes = jnp.exp(0.5 * jax.random.normal(keys[0], (shape[0], 1)))  # unequal rows
        found = stages(sizes * jax.random.normal(keys[1], shape))
        first = next(iter(found.values()))
        for name, x in found.items():
            for side in ("row", "col"):
                measures = norm_variance(x, side), relative_variance(x, side), norm_ratio(x, side)
                order = spearman(first, x, side)
                rows.append(
                    ["x".join(map(str, shape)), name, side]
                    + [f"{float(value):.2g}" for value in (*measures, order)]
                )
    head = ["shape", "stage", "side", "variance", "relative", "largest / smallest", "ranks"]
    print(markdown(head, rows, left=3))


if __name__ == "__main__":
    sys.exit(main())
