"""A choice by the platform, and loops over arrays or slices of one shape.

A program contains the function of a loop once.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from optax_muonplus._chain.record import varying_axes

Tree = TypeVar("Tree")
Arrays = tuple[jax.Array, ...]
# "gpu" also stands for every backend without a name here.
Platform = Literal["cpu", "tpu", "gpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)


def on_its_platform(
    work: Callable[[Platform], Callable[..., Any]], *args: Any, platform: Platform | None = None
) -> Any:
    """Computes ``work(platform)(*args)`` for the platform that the program is lowered for.

    All three are traced, and one is lowered; ``jax.export`` to several platforms keeps several. So
    this question is asked in one place, the outermost, and the answer handed down. If ``platform``
    is given, it is the only one.
    """
    if platform is not None:
        return work(platform)(*args)
    cpu, tpu, gpu = map(work, PLATFORMS)
    return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)


def platform_of(backend: str) -> Platform:
    """Returns the platform of a backend of JAX, by its name."""
    return backend if backend in ("cpu", "tpu") else "gpu"


def map_in_place(
    function: Callable[..., jax.Array], sources: Sequence[Arrays], in_place: bool = False
) -> list[jax.Array]:
    """Maps ``function`` over tuples of arrays, in a loop that needs memory for its results alone.

    A stack of the arrays, as ``jax.lax.map`` wants, would be a second copy of the model; and a
    program with the function written out for each array would compile as many times as long. The
    loop is differentiable.

    XLA gives the memory of the last outputs of a program to the first results of a loop. Callers
    therefore pass the arrays in reverse order: the loop and the updates made from its results then
    share memory. In the other order they take a second copy. Results have the shape of the arrays,
    and may have another dtype; ``in_place`` lets those of the first arrays' dtype take their place.
    """
    if len(sources) == 1:
        return [function(*sources[0])]
    # What the function closes over (a traced eps) may be differentiated too.
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

    if in_place:
        results = [arrays[0] for arrays in sources]
    else:
        results = [jnp.zeros(result.shape, result.dtype) for _ in sources]
    inputs = jax.tree.leaves((sources, closed_over))
    return jax.lax.fori_loop(0, len(sources), body, [_varying_like(x, inputs) for x in results])


@_loop.defjvp
def _derivative(
    function: Callable[..., jax.Array], in_place: bool, primals: Any, tangents: Any
) -> Any:
    """Writes the loop out: differentiated as a loop it would keep all results of every turn."""
    del in_place

    def written_out(sources: list[Arrays], closed_over: list[jax.Array]) -> list[jax.Array]:
        return [function(*arrays, *closed_over) for arrays in sources]

    return jax.jvp(written_out, primals, tangents)


def pick(i: jax.Array, trees: Sequence[Tree]) -> Tree:
    """Returns ``trees[i]`` for a traced ``i``, without a stack, which would copy all of them."""
    return jax.lax.switch(i, [functools.partial(lambda tree: tree, tree) for tree in trees])


@jax.jit  # so that it is traced once
def _replace_if(condition: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns ``new`` if ``condition``, else ``old``, in the memory of ``old``.

    A ``while`` loop of no turns or one: it compiles in half the time of ``jax.lax.cond``.
    """
    once = (condition, old)
    return jax.lax.while_loop(lambda state: state[0], lambda state: (False, new), once)[1]


def map_slices(
    function: Callable[..., jax.Array], sources: Arrays, size: int, in_place: bool = False
) -> jax.Array:
    """Maps ``function`` over slices of arrays along their first axis, one after the other.

    A loop reads each slice, of ``size``, where it lies and writes its result where it belongs.
    ``jax.lax.map`` would first fill the results with zeros. ``function`` is the same for each part
    of a slice; the rest is as in :func:`map_in_place`.
    """
    if len(sources[0]) <= size:  # or there are none
        return function(*sources)
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
    results = _varying_like(results, [*sources, *closed_over])
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


@jax.custom_jvp
def concatenate(arrays: list[jax.Array]) -> jax.Array:
    """Joins arrays along their first axis.

    Each is written by the operation that computes it. On a TPU a short ``jnp.concatenate`` is a
    pass of its own over all of them.
    """
    if len(arrays) == 1:
        return arrays[0]
    stops = list(itertools.accumulate(len(x) for x in arrays))
    stack = _empty_like(arrays[0], (stops[-1], *arrays[0].shape[1:]), arrays[0].dtype)
    for x, stop in zip(arrays, stops, strict=True):
        stack = jax.lax.dynamic_update_slice_in_dim(stack, x, stop - len(x), 0)
    return stack


@concatenate.defjvp
def _concatenate_derivative(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Uses ``jnp.concatenate``: ``jax.vmap`` gives each of its members an empty array."""
    return jax.jvp(jnp.concatenate, primals, tangents)


def _empty_like(source: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array without content that has members under ``jax.vmap`` if ``source`` does.

    ``jax.lax.empty`` has them always where a program is batched, so that results of what is the
    same for all members would have them too; and members on Explicit axes need a sharding.
    """
    typed = jax.typeof(source).sharding
    sharding = None if typed.mesh.empty else NamedSharding(typed.mesh, typed.spec)
    empty = jax.custom_batching.custom_vmap(
        lambda _: jax.lax.empty(shape, dtype, out_sharding=sharding)
    )
    empty.def_vmap(lambda n, _, members: (_empty_like(members, (n, *shape), dtype), True))
    return empty(source)


def _varying_like(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Makes ``x`` an array that varies over the Manual axes that one of ``others`` does."""
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(other)) for other in others))
    missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):  # since jax 0.8.2
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)
