"""Matrices of one shape worked on together: programs grow with the number of shapes, not of layers.

How, depends on the backend.

On a CPU one matrix fills all cores, and a stack only adds copies and cache misses (eight matrices
of 384 x 1536 in float32 on 2 cores: 11.3 ms each one by one, 13.8 ms in a stack; 384 x 384: 6.4 and
6.6 ms). There each shape is one loop over its matrices, which reads and writes them where they lie.

Elsewhere small matrices leave most of the device idle, and a loop that chooses a matrix at run time
waits for the host at every turn. There matrices are stacked, a tall one turned to join the wide
ones, up to a bound on the stack's size, so that what the iteration needs beside its input does not
grow with the model. That part is reasoned, not measured: no accelerator was at hand.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus.matrices._matrix_function import ArrayFunction, MatrixFunction, in_turn

# Of one stack: 32 float32 matrices of 1024 x 1024, or 8 of 2048 x 2048. By count, the iteration on
# square matrices needs four times as much beside it: R, R^2, P and the next X.
STACK_BYTES = 2**27


class Stored(NamedTuple):
    """Matrices as they lie in memory.

    Attributes:
      array: ``(batch, out, in)``, or ``(batch, in, out)``.
      transposed: whether it is the latter.
    """

    array: jax.Array
    transposed: bool


def apply_grouped(
    functions: Sequence[MatrixFunction], matrices: Sequence[Stored]
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix.

    Args:
      functions: shape-preserving.
      matrices: arrays of any shapes, each with its orientation.

    Returns:
      One array for each of ``matrices``, in order, stored in the same way.
    """
    arrays = [stored.array for stored in matrices]
    turned = [stored.transposed for stored in matrices]
    if not arrays:
        return []
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        # Outside of jit each operation is a program of its own, and a loop would be compiled anew
        # at every call.
        whole = in_turn(functions)
        return [whole.of(t)(array) for array, t in zip(arrays, turned, strict=True)]

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        return _looped(functions, arrays, turned)

    def elsewhere(*arrays: jax.Array) -> list[jax.Array]:
        return _stacked(functions, arrays, turned)

    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)


def where_they_were(
    matrices: Sequence[Stored], results: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """``results``, on a mesh with Auto axes sharded as the ``matrices`` that they were made of.

    The compiler would else choose for them what suits a loop or a stack. Costs another read of each
    matrix, which is saved where there is one device.
    """
    traced = any(isinstance(stored.array, jax.core.Tracer) for stored in matrices)
    if not traced or jax.device_count() == 1:
        return results
    # A choice that the compiler cannot see through ties them together.
    never = jax.lax.optimization_barrier(jnp.array(False))
    return [
        jax.lax.select(never, stored.array, y) for stored, y in zip(matrices, results, strict=True)
    ]


def _looped(
    functions: Sequence[MatrixFunction], arrays: Sequence[jax.Array], turned: Sequence[bool]
) -> list[jax.Array]:
    whole = in_turn(functions)
    results = list(arrays)

    def key(i: int) -> Hashable:
        return arrays[i].shape, arrays[i].dtype, turned[i]

    for members in _groups(range(len(arrays)), key):
        # XLA gives the memory of the last outputs to the first results of a loop. In this order
        # loops and the updates made from them share it; in the other they take a second copy.
        members.reverse()
        done = _one_by_one(whole.of(turned[members[0]]), [arrays[i] for i in members])
        for i, result in zip(members, done, strict=True):
            results[i] = result
    return results


def _one_by_one(function: ArrayFunction, arrays: list[jax.Array]) -> Sequence[jax.Array]:
    """``function`` of each array ``(batch, rows, columns)``, in a program that holds it once."""
    batch = arrays[0].shape[0]
    if batch > 1:
        each = functools.partial(jax.lax.map, lambda matrix: function(matrix[None])[0])
    else:
        # Without the axis of size 1, the shape that the parameter has: see _looped.
        arrays = [x[0] for x in arrays]

        def each(x: jax.Array) -> jax.Array:
            return function(x[None])[0]

    if len(arrays) == 1:
        results = [each(arrays[0])]
    else:
        # What it closes over (a traced eps) may be differentiated too.
        closed, over = jax.closure_convert(each, arrays[0])
        results = _looped_over(closed, arrays, over)
    return results if batch > 1 else [y[None] for y in results]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _looped_over(
    function: Callable[..., jax.Array], arrays: list[jax.Array], over: list[jax.Array]
) -> list[jax.Array]:
    indices = range(len(arrays))

    def body(i: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        # A stack of the arrays would be a second copy of the model; a choice among them is not.
        x = jax.lax.switch(i, [functools.partial(operator.getitem, arrays, k) for k in indices])
        y = function(x, *over)
        return [_replaced_if(i == k, old, y) for k, old in enumerate(results)]

    return jax.lax.fori_loop(0, len(arrays), body, [jnp.zeros_like(x) for x in arrays])


@_looped_over.defjvp
def _one_after_the_other(function: Callable[..., jax.Array], primals: Any, tangents: Any) -> Any:
    """Derivatives of the loop would keep all results of every turn; those of a chain do not."""
    return jax.jvp(lambda arrays, over: [function(x, *over) for x in arrays], primals, tangents)


@jax.jit  # so that it is traced once
def _replaced_if(condition: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """``new`` if ``condition``, else ``old``, in the memory of ``old``.

    A loop of no turns or one: it compiles in half the time of ``jax.lax.cond``.
    """
    once = (condition, old)
    return jax.lax.while_loop(lambda state: state[0], lambda state: (False, new), once)[1]


def _stacked(
    functions: Sequence[MatrixFunction], arrays: Sequence[jax.Array], turned: Sequence[bool]
) -> list[jax.Array]:
    tall = [x.shape[-2] > x.shape[-1] for x in arrays]
    wide = [jnp.swapaxes(x, -1, -2) if t else x for x, t in zip(arrays, tall, strict=True)]
    # Of the arrays as they now stand.
    transposed = [a != b for a, b in zip(turned, tall, strict=True)]
    results = list(arrays)

    def key(i: int) -> Hashable:
        return wide[i].shape[-2:], wide[i].dtype

    for group in _groups(range(len(arrays)), key):
        members = sorted(group, key=lambda i: transposed[i])  # so that each stack has one border
        done: list[jax.Array] = []
        for chunk in _chunks(members, lambda i: wide[i].size * wide[i].dtype.itemsize):
            upright = sum(wide[i].shape[0] for i in chunk if not transposed[i])
            stops = itertools.accumulate(wide[i].shape[0] for i in chunk)
            stack = _on_stack(functions, jnp.concatenate([wide[i] for i in chunk]), upright)
            done += jnp.split(stack, list(stops)[:-1])
        for i, result in zip(members, done, strict=True):
            results[i] = jnp.swapaxes(result, -1, -2) if tall[i] else result
    return results


def _on_stack(functions: Sequence[MatrixFunction], x: jax.Array, upright: int) -> jax.Array:
    """``functions`` of a stack whose first ``upright`` matrices are, and others are transposed."""
    at_once = max(1, STACK_BYTES // (math.prod(x.shape[1:]) * x.dtype.itemsize))
    if len(x) > at_once:  # one parameter of many layers or experts
        whole = in_turn(functions).of(upright == 0)
        return jax.lax.map(lambda matrix: whole(matrix[None])[0], x, batch_size=at_once)
    for function in functions:
        if upright in (0, len(x)) or function.upright is function.transposed:
            x = function.of(upright == 0)(x)
        else:
            parts = function.of(False)(x[:upright]), function.of(True)(x[upright:])
            x = jnp.concatenate(parts)
    return x


def _groups(items: Sequence[int], key: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """``items`` that agree in ``key``, in the order of their first member."""
    groups: dict[Hashable, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from groups.values()


def _chunks(items: Sequence[int], size: Callable[[int], int]) -> Iterator[list[int]]:
    """Runs of ``items`` that together stay within the bound, or have a single member."""
    chunk: list[int] = []
    total = 0
    for item in items:
        if chunk and total + size(item) > STACK_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    yield chunk
