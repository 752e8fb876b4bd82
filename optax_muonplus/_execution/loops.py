"""Loops over slices of arrays, and arrays that they fill."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_muonplus._leaves.placement import varying_axes

Arrays = tuple[jax.Array, ...]


def map_slices(
    function: Callable[..., jax.Array], sources: Arrays, size: int, in_place: bool = False
) -> jax.Array:
    """Maps ``function`` over slices of ``size`` along the first axis of ``sources``."""
    if len(sources[0]) <= size:  # or there are none
        return function(*sources)
    # ``jax.lax.map`` would first fill the results with zeros.
    closed, closed_over = jax.closure_convert(function, *(x[:size] for x in sources))
    return _slice_loop(closed, size, in_place, sources, closed_over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _slice_loop(
    function: Callable[..., jax.Array],
    size: int,
    in_place: bool,
    sources: Arrays,
    closed_over: list[jax.Array],
) -> jax.Array:
    x, *others = sources
    dtype = jax.eval_shape(function, *(x[:size] for x in sources), *closed_over).dtype
    in_place = in_place and dtype == x.dtype

    def body(i: jax.Array, results: jax.Array) -> jax.Array:
        given = (results if in_place else x, *others)
        parts = [jax.lax.dynamic_slice_in_dim(array, i * size, size) for array in given]
        y = function(*parts, *closed_over)
        return jax.lax.dynamic_update_slice_in_dim(results, y, i * size, 0)

    results = x if in_place else _empty_like(x, x.shape, dtype)
    results = varying_like(results, [*sources, *closed_over])
    return jax.lax.fori_loop(0, len(x) // size, body, results)


@_slice_loop.defjvp
def _slice_derivative(
    function: Callable[..., jax.Array], size: int, in_place: bool, primals: Any, tangents: Any
) -> Any:
    """Uses ``jax.lax.map``: a loop that overwrites its results has no reverse derivative."""
    del in_place

    def mapped(sources: Arrays, closed_over: list[jax.Array]) -> jax.Array:
        slices = tuple(x.reshape(-1, size, *x.shape[1:]) for x in sources)
        y = jax.lax.map(lambda parts: function(*parts, *closed_over), slices)
        return y.reshape(sources[0].shape)

    return jax.jvp(mapped, primals, tangents)


def concatenate(arrays: list[jax.Array], after: Sequence[jax.Array] = ()) -> jax.Array:
    """Joins arrays along their first axis, each written by the operation that computes it.

    The result is allocated once the arrays ``after`` are computed.
    """
    return _concatenate(arrays, list(after))


@jax.custom_jvp
def _concatenate(arrays: list[jax.Array], after: list[jax.Array]) -> jax.Array:
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


@_concatenate.defjvp
def _concatenate_derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Differentiates ``jnp.concatenate``, which needs no empty array."""
    return jax.jvp(jnp.concatenate, primals[:1], tangents[:1])


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
    return empty(source)


def varying_like(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Makes ``x`` vary over the Manual axes that any of ``others`` varies over."""
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(other)) for other in others))
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    if jax.__version_info__ < (0, 8, 2):
        return jax.lax.pvary(x, missing)  # ty: ignore[missing-attribute]
    return jax.lax.pcast(x, missing, to="varying")
