"""A CPU: one loop for each shape, which reads and writes matrices where they lie.

One matrix fills all cores; a stack only adds copies and cache misses. A float32 matrix of 384 x
1536, one of eight on 2 cores, took 11.3 ms alone and 13.8 ms in a stack; 384 x 384: 6.4 and 6.6 ms.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_muonplus._execution.batches import MatrixBatch, group_by
from optax_muonplus._execution.loops import Arrays, varying_like
from optax_muonplus._execution.lower import Program

Tree = TypeVar("Tree")


def apply_in_loops(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to one matrix after the other, in a loop for each shape."""
    results: dict[int, jax.Array] = {}
    for members in group_by(batches, lambda x: (x.program_key, x.shape[0])):
        members.reverse()  # see map_in_place
        group = [batches[i] for i in members]
        first = group[0]
        # A matrix that is computed from other arrays can share memory with its result.
        in_place = first.operand.compute is not None and first.operand.dtype == first.result_dtype
        apply = _in_place if in_place and first.shape[0] == 1 else _one_by_one
        results |= zip(members, apply(program, group), strict=True)
    return [results[i] for i in range(len(batches))]


def _in_place(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to single matrices of one shape, computed before the loop."""
    function = batches[0].of_arrays(program)
    # XLA passes shardings on, from sources to matrices to results. Without the axis of size 1,
    # arrays have the shape of the parameter and can share its memory.
    made = [(batch.operand.map(lambda x: x[0]).load(),) for batch in batches]
    results = map_in_place(lambda x: function(x[None])[0], made, in_place=True)
    return [y[None] for y in results]


def _one_by_one(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to batches of one shape, each matrix loaded inside the loop."""
    first = batches[0]
    function = first.of_arrays(program)

    def of_matrix(*arrays: jax.Array) -> jax.Array:
        return function(first.operand._replace(arrays=arrays).map(lambda x: x[None]).load())[0]

    if first.shape[0] == 1:
        single = [batch.operand.map(lambda x: x[0]).arrays for batch in batches]
        return [y[None] for y in map_in_place(of_matrix, single)]

    def of_batch(*arrays: jax.Array) -> jax.Array:
        return jax.lax.map(lambda parts: of_matrix(*parts), arrays)

    return map_in_place(of_batch, [batch.operand.arrays for batch in batches])


def map_in_place(
    function: Callable[..., jax.Array], sources: Sequence[Arrays], in_place: bool = False
) -> list[jax.Array]:
    """Maps ``function`` over tuples of arrays, in a loop that needs memory for its results only."""
    # The stack of ``jax.lax.map`` would be a second copy of the model; a function written out for
    # each array would take that many times as long to compile.
    # XLA gives the memory of a program's last outputs to the first results of a loop. Callers pass
    # arrays in reverse order: results then share memory with the updates made from them.
    if len(sources) == 1:
        return [function(*sources[0])]
    # Values that the function closes over, such as a traced eps, may be differentiated too.
    closed, closed_over = jax.closure_convert(function, *sources[0])
    return _loop(closed, in_place, list(sources), closed_over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loop(
    function: Callable[..., jax.Array],
    in_place: bool,
    sources: list[Arrays],
    closed_over: list[jax.Array],
) -> list[jax.Array]:
    result = jax.eval_shape(function, *sources[0], *closed_over)
    in_place = in_place and result.dtype == sources[0][0].dtype
    others = [arrays[in_place:] for arrays in sources]

    def body(i: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        given = [(y, *x) for y, x in zip(results, others, strict=True)] if in_place else others
        y = function(*pick(i, given), *closed_over)
        return [_replace_if(i == k, old, y) for k, old in enumerate(results)]

    results = [x[0] if in_place else jnp.zeros(result.shape, result.dtype) for x in sources]
    inputs = jax.tree.leaves((sources, closed_over))
    return jax.lax.fori_loop(0, len(sources), body, [varying_like(x, inputs) for x in results])


@_loop.defjvp
def _derivative(
    function: Callable[..., jax.Array], in_place: bool, primals: Any, tangents: Any
) -> Any:
    """Writes the loop out: the derivative of a loop would keep all results of every turn."""
    del in_place

    def written_out(sources: list[Arrays], closed_over: list[jax.Array]) -> list[jax.Array]:
        return [function(*arrays, *closed_over) for arrays in sources]

    return jax.jvp(written_out, primals, tangents)


def pick(i: jax.Array, trees: Sequence[Tree]) -> Tree:
    """Returns ``trees[i]`` for a traced ``i``, without a stack, which would copy all of them."""
    return jax.lax.switch(i, [functools.partial(lambda tree: tree, tree) for tree in trees])


@jax.jit  # traces it once
def _replace_if(condition: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns ``new`` if ``condition``, else ``old``, in the memory of ``old``."""
    # A loop of at most one turn compiles in half the time of ``jax.lax.cond``.
    once = (condition, old)
    return jax.lax.while_loop(lambda state: state[0], lambda state: (False, new), once)[1]
