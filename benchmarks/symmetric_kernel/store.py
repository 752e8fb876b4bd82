"""How a warpgroup of the kernel for symmetric products stores its part of a result, twice."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike

PARTS = 4  # in a row of a block

Ref = Any  # a reference of Mosaic GPU, which has no public type for it

# How the tensor cores return the parts, spread over the threads; and the same transposed.
_LAYOUT, _TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED

_load: Any = plgpu.load  # JAX 0.10, which the kernel is not for, has other arguments


class Buffers(NamedTuple):
    """Shared memory from which parts are stored, as they are and transposed.

    Attributes:
      upright: one part, or one for each warpgroup.
      mirrored: the same.
    """

    upright: Ref
    mirrored: Ref

    def of(self, warpgroup: jax.Array) -> "Buffers":
        """Returns the buffers of one warpgroup."""
        return Buffers(self.upright.at[warpgroup], self.mirrored.at[warpgroup])


def store_parts(
    total: jax.Array, rest: Sequence[Ref], row: jax.Array, column: jax.Array, buffers: Buffers
) -> None:
    """Stores four parts, from part ``(row, column)`` on, and those below the diagonal mirrored.

    Numbers in comments are those of :mod:`benchmarks.symmetric_kernel.kernel`, which says why
    no thread reads or writes too early.

    Args:
      total: the product, of which these parts are a row.
      rest: C and the coefficients, if there are any; and the result.
      row: of the parts, counted in parts.
      column: of the first part, counted in parts.
      buffers: of this warpgroup.
    """
    *combination, out = rest
    height = total.shape[0]
    rows = strip(row, height)
    spans = [strip(column + k, height) for k in range(PARTS)]
    gamma: ArrayLike = 0.0
    load = functools.partial(_load, layout=_LAYOUT, optimized=False)
    if combination:
        addend, coefficients = combination
        alpha, beta, gamma = (coefficients[k] for k in range(3))
        # Each part of C is on its way to registers while the one before it is stored.
        following = load(addend.at[rows, spans[0]])
    for k in range(PARTS):
        part = total[:, k * height : (k + 1) * height]
        if combination:
            part = alpha * part + beta * following.astype(jnp.float32)
            if k + 1 < PARTS:
                following = load(addend.at[rows, spans[k + 1]])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # 1
        below, diagonal = row > column + k, row == column + k
        pl.when(below)(functools.partial(_write, part, buffers))  # 2
        pl.when(diagonal)(functools.partial(_write_symmetric, part, gamma, buffers))
        plgpu.commit_smem()  # 3
        copy = plgpu.copy_smem_to_gmem
        pl.when(row >= column + k)(functools.partial(copy, buffers.upright, out.at[rows, spans[k]]))
        pl.when(below)(functools.partial(copy, buffers.mirrored, out.at[spans[k], rows]))


def _write(part: jax.Array, buffers: Buffers) -> None:
    """Rounds a part and writes it to both buffers."""
    value = part.astype(buffers.upright.dtype)
    buffers.upright[...] = value
    buffers.mirrored.transpose((1, 0))[...] = plgpu.layout_cast(value, _TRANSPOSED)


def _write_symmetric(part: jax.Array, gamma: ArrayLike, buffers: Buffers) -> None:
    """Writes a part on the diagonal, plus ``gamma I``, with its lower triangle mirrored.

    For A = B the part is symmetric without that. For two matrices that commute but for rounding it
    is not, and the products that follow take its columns for its rows.
    """
    i, j = (plgpu.broadcasted_iota(jnp.int32, part.shape, axis, layout=_LAYOUT) for axis in (0, 1))
    value = (part + gamma * (i == j).astype(jnp.float32)).astype(buffers.upright.dtype)
    buffers.mirrored.transpose((1, 0))[...] = plgpu.layout_cast(value, _TRANSPOSED)
    opposite = _load(buffers.mirrored, layout=_LAYOUT)
    buffers.upright[...] = jnp.where(i >= j, value, opposite)


def strip(start: jax.Array, height: int, parts: int = 1) -> Any:
    """Rows or columns of ``parts`` parts, behind ``start`` parts."""
    return pl.ds(pl.multiple_of(start * height, height), parts * height)
