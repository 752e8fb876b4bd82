"""Loops over slices of arrays, and arrays that they fill."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from optax_muonplus._leaves.placement import varying_axes

Arrays = tuple[jax.Array, ...]


def map_slices(
    function: Callable[..., jax.Array], sources: Arrays, size: int, in_place: bool = False
) -> jax.Array:
    """Maps ``function`` over slices of ``size`` along the first axis of ``sources``."""
    x, *others = sources
    if len(x) <= size:  # or there are none
        return function(*sources)
    first = [source[:size] for source in sources]
    closed, closed_over = jax.closure_convert(function, *first)  # traced once
    dtype = jax.eval_shape(closed, *first, *closed_over).dtype
    in_place = in_place and dtype == x.dtype

    def body(i: jax.Array, results: jax.Array) -> jax.Array:
        given = (results if in_place else x, *others)
        parts = [jax.lax.dynamic_slice_in_dim(array, i * size, size) for array in given]
        y = closed(*parts, *closed_over)
        return jax.lax.dynamic_update_slice_in_dim(results, y, i * size, 0)

    # ``jax.lax.map`` would first fill the results with zeros.
    results = x if in_place else _empty_like(x, x.shape, dtype)
    results = varying_like(results, [*sources, *closed_over])
    return jax.lax.fori_loop(0, len(x) // size, body, results)


def concatenate(arrays: list[jax.Array], after: Sequence[jax.Array] = ()) -> jax.Array:
    """Joins arrays along their first axis, each written by the operation that computes it.

    The result is allocated once the arrays ``after`` are computed.
    """
    # On a TPU a short ``jnp.concatenate`` is a separate pass over all arrays.
    if len(arrays) == 1:
        return arrays[0]
    stops = list(itertools.accumulate(len(x) for x in arrays))
    stack = _empty_like(arrays[0], (stops[-1], *arrays[0].shape[1:]), arrays[0].dtype)
    # XLA would otherwise fill all stacks of a program before it works on the first.
    stack, _ = jax.lax.optimization_barrier((stack, after))
    for x, stop in zip(arrays, stops, strict=True):
        stack = jax.lax.dynamic_update_slice_in_dim(stack, x, stop - len(x), 0)
    return stack


def _empty_like(source: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array without content, batched under ``jax.vmap`` if ``source`` is."""
    typed = jax.typeof(source).sharding
    sharding = None if typed.mesh.empty else NamedSharding(typed.mesh, typed.spec)
    # Under ``jax.vmap``, ``jax.lax.empty`` is batched even if ``source`` is not, and would make all
    # results batched. A batched array on Explicit axes needs a sharding.
    empty = jax.custom_batching.custom_vmap(
        lambda _: jax.lax.empty(shape, dtype, out_sharding=sharding)
    )
    empty.def_vmap(lambda n, _, members: (_empty_like(members, (n, *shape), dtype), True))
    # ``custom_vmap`` has no reverse derivative; nothing here depends on the numbers of ``source``.
    return empty(jax.lax.stop_gradient(source))


def varying_like(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Makes ``x`` vary over the Manual axes that any of ``others`` varies over."""
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(other)) for other in others))
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    if jax.__version_info__ < (0, 8, 2):
        return jax.lax.pvary(x, missing)  # ty: ignore[missing-attribute]
    return jax.lax.pcast(x, missing, to="varying")
