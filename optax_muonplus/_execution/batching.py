"""Matrices of one shape worked on together: programs grow with the number of shapes, not of layers.

How, depends on the backend.

On a CPU one matrix fills all cores, and a stack only adds copies and cache misses (eight matrices
of 384 x 1536 in float32 on 2 cores: 11.3 ms each one by one, 13.8 ms in a stack; 384 x 384: 6.4 and
6.6 ms). There each shape is one loop over its matrices, which reads and writes them where they lie.

Elsewhere small matrices leave most of the device idle, and a loop that chooses a matrix at run time
waits for the host at every turn. There matrices are stacked, and a tall one is transposed to join
the wide ones. A stack has a maximum size, so that the memory that the iteration needs beside its
input does not grow with the model; a leaf of many layers is cut into slices of that size. In half
precision matrices are rounded before they are stacked. That part was seen in programs that XLA
compiled for an H100, and was not run: no accelerator was at hand.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus._xla.loops import map_in_place
from optax_muonplus.matrices._matrix_function import (
    Composition,
    MatrixFunction,
    compose,
    for_layout,
)
from optax_muonplus.matrices._precision import narrower

# Of one stack: 32 float32 matrices of 1024 x 1024, or 8 of 2048 x 2048. By count, the iteration on
# square matrices needs four times as much beside it: R, R^2, P and the next X.
STACK_BYTES = 2**27


class MatrixBatch(NamedTuple):
    """Matrices as they lie in memory.

    Attributes:
      array: ``(batch, out, in)``, or ``(batch, in, out)``.
      transposed: whether it is the latter.
    """

    array: jax.Array
    transposed: bool


def apply_batched(
    functions: Sequence[MatrixFunction], batches: Sequence[MatrixBatch]
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix.

    Args:
      functions: functions of matrices.
      batches: matrices of any shapes.

    Returns:
      One array for each of ``batches``, in order, stored in the same way.
    """
    arrays = [batch.array for batch in batches]
    transposed = [batch.transposed for batch in batches]
    if not arrays:
        return []
    steps = compose(functions)
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        # Outside of jit each operation is a program of its own, and a loop would be compiled anew
        # at every call.
        return [for_layout(steps, t)(x) for x, t in zip(arrays, transposed, strict=True)]

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        return _looped(steps, arrays, transposed)

    def elsewhere(*arrays: jax.Array) -> list[jax.Array]:
        return _stacked(steps, arrays, transposed)

    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)


def _looped(
    steps: Composition, arrays: Sequence[jax.Array], transposed: Sequence[bool]
) -> list[jax.Array]:
    results = list(arrays)

    def key(i: int) -> Hashable:
        return arrays[i].shape, arrays[i].dtype, transposed[i]

    for members in _groups(range(len(arrays)), key):
        members.reverse()  # see map_in_place
        function = for_layout(steps, transposed[members[0]])
        group = _one_by_one(function, [arrays[i] for i in members])
        for i, result in zip(members, group, strict=True):
            results[i] = result
    return results


def _one_by_one(
    function: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]
) -> list[jax.Array]:
    """``function`` of each array ``(batch, rows, columns)``, matrix by matrix."""
    if arrays[0].shape[0] > 1:
        each = functools.partial(jax.lax.map, lambda matrix: function(matrix[None])[0])
        return map_in_place(each, arrays)
    # Without the axis of size 1 arrays have the shape of the parameter, and can share its memory.
    results = map_in_place(lambda x: function(x[None])[0], [x[0] for x in arrays])
    return [y[None] for y in results]


def _stacked(
    steps: Composition, arrays: Sequence[jax.Array], transposed: Sequence[bool]
) -> list[jax.Array]:
    tall = [x.shape[-2] > x.shape[-1] for x in arrays]
    # Rounded before they are copied, where the first step rounds them anyway.
    input_dtype = steps.input_dtype
    narrow = [x.astype(narrower(x.dtype, input_dtype)) if input_dtype else x for x in arrays]
    wide = [jnp.swapaxes(x, -1, -2) if t else x for x, t in zip(narrow, tall, strict=True)]
    # The layout of the arrays in ``wide``.
    transposed = [a != b for a, b in zip(transposed, tall, strict=True)]
    results = list(arrays)

    def key(i: int) -> Hashable:
        return wide[i].shape[-2:], arrays[i].dtype

    for group in _groups(range(len(arrays)), key):
        # Sorted, so that each stack has the two layouts in two runs.
        members = sorted(group, key=lambda i: transposed[i])
        parts: list[jax.Array] = []
        for chunk in _chunks(members, lambda i: wide[i].size * arrays[i].dtype.itemsize):
            upright = sum(wide[i].shape[0] for i in chunk if not transposed[i])
            stops = itertools.accumulate(wide[i].shape[0] for i in chunk)
            stack = jnp.concatenate([wide[i] for i in chunk])
            stack = _on_stack(steps, stack, upright, arrays[chunk[0]].dtype)
            parts += jnp.split(stack, list(stops)[:-1])
        for i, result in zip(members, parts, strict=True):
            results[i] = jnp.swapaxes(result, -1, -2) if tall[i] else result
    return results


def _on_stack(steps: Composition, x: jax.Array, upright: int, dtype: jnp.dtype) -> jax.Array:
    """``steps`` of a stack whose first ``upright`` matrices are (out, in), the others (in, out).

    The first step may get matrices in a narrower dtype; the others get them in ``dtype``.
    """
    at_once = max(1, STACK_BYTES // (math.prod(x.shape[1:]) * dtype.itemsize))
    if len(x) > at_once:  # one parameter of many layers or experts, all in one layout
        starts = range(0, len(x), at_once)
        slices = [jax.lax.slice_in_dim(x, i, min(i + at_once, len(x))) for i in starts]
        counts = [len(part) if upright else 0 for part in slices]
        return jnp.concatenate(
            [_on_stack(steps, part, n, dtype) for part, n in zip(slices, counts, strict=True)]
        )
    for function in steps.functions:
        if upright in (0, len(x)):
            x = for_layout(function, upright == 0)(x)
        elif function.transpose_equivariant:
            x = function(x)
        else:
            parts = function(x[:upright]), function.transposed()(x[upright:])
            x = jnp.concatenate(parts)
        x = x.astype(dtype)
    return x


def _groups(items: Sequence[int], key: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """``items`` that agree in ``key``, in the order of their first member."""
    groups: dict[Hashable, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from groups.values()


def _chunks(items: Sequence[int], size: Callable[[int], int]) -> Iterator[list[int]]:
    """Runs of ``items`` whose sizes add up to ``STACK_BYTES`` at most, or of a single item."""
    chunk: list[int] = []
    total = 0
    for item in items:
        if chunk and total + size(item) > STACK_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    yield chunk
