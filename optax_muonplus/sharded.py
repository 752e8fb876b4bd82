"""Functions on matrices that lie in shards on a mesh, each matrix whole on one of its devices."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_muonplus.assignment import cheapest_route
from optax_muonplus.dimension_numbers import MatrixView
from optax_muonplus.exchange import Kind, exchanged
from optax_muonplus.orientation import MatrixFunction
from optax_muonplus.placement import Home, usable_axes


class Placed(NamedTuple):
    """One parameter-sized array on a mesh.

    Attributes:
      array: it, this device's shard of it, or None where only the rest is meant.
      view: its matrices.
      home: where it lies.
      result_dtype: dtype of what is made of it.
    """

    array: Any
    view: MatrixView
    home: Home
    result_dtype: Any


def apply_sharded(
    functions: Sequence[MatrixFunction], placed: Sequence[Placed], moved_as: Any = None
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix of every array.

    Args:
      functions: shape-preserving.
      placed: arrays, all on one mesh.
      moved_as: dtype on the way to where an array is worked on, if it is narrower than the array's
        and has its exponents. Results travel in their own dtype.

    Returns:
      One array for each of ``placed``, in order, where that one lies.
    """
    arrays = [p.array for p in placed]
    layouts = tuple(p._replace(array=None) for p in placed)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return _mapped(*arrays, functions=tuple(functions), layouts=layouts, moved_as=moved_as)
    return _compiled(*arrays, functions=tuple(functions), layouts=layouts, moved_as=moved_as)


def _mapped(
    *arrays: jax.Array,
    functions: tuple[MatrixFunction, ...],
    layouts: tuple[Placed, ...],
    moved_as: Any,
) -> list[jax.Array]:
    mesh = layouts[0].home.mesh
    names = usable_axes(mesh)
    sizes = {name: mesh.shape[name] for name in names}
    specs = tuple(PartitionSpec(*(cut or None for cut in p.home.axes)) for p in layouts)
    convoys: dict[Any, list[int]] = collections.defaultdict(list)
    for i, (p, array) in enumerate(zip(layouts, arrays, strict=True)):
        convoys[(*_axes(p, sizes), array.dtype, p.result_dtype)].append(i)

    def on_each_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        results = list(shards)
        for (sharding, replicas, *_), members in convoys.items():
            local = [layouts[i]._replace(array=shards[i]) for i in members]
            done = _convoy(functions, local, sharding, replicas, sizes, moved_as)
            for i, result in zip(members, done, strict=True):
                results[i] = result
        return tuple(results)

    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
        axis_names=set(names),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    return list(mapped(*arrays))


# Outside of jit every operation would be a program of its own, and compiled anew at every call.
_compiled = jax.jit(_mapped, static_argnames=("functions", "layouts", "moved_as"))


def _axes(p: Placed, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that cut the matrices, and those along which they are the same."""
    cut = {name for axis in p.view.matrix_axes for name in p.home.axes[axis]}
    batch = {name for axis in p.view.batch_axes for name in p.home.axes[axis]}
    sharding = tuple(name for name in sizes if name in cut)
    replicas = tuple(name for name in sizes if sizes[name] > 1 and name not in cut | batch)
    return sharding, replicas


def _convoy(
    functions: Sequence[MatrixFunction],
    local: Sequence[Placed],
    sharding: tuple[str, ...],
    replicas: tuple[str, ...],
    sizes: Mapping[str, int],
    moved_as: Any,
) -> list[jax.Array]:
    """What travels along the same mesh axes, in the same dtypes."""
    dtype, result_dtype = local[0].array.dtype, jnp.dtype(local[0].result_dtype)
    moved = _narrower(dtype, moved_as)
    members: dict[Kind, list[int]] = collections.defaultdict(list)
    for i, p in enumerate(local):
        axes = tuple(p.home.axes[axis] for axis in p.view.matrix_axes)
        members[Kind(p.view.stacked(1), axes, tuple(sizes.items()))].append(i)
    items = [_items(p).astype(moved) for p in local]
    shards = [jnp.concatenate([items[i] for i in kind]) for kind in members.values()]
    route = cheapest_route(
        [kind.stock(len(x)) for kind, x in zip(members, shards, strict=True)],
        sharding,
        replicas,
        sizes,
        (jnp.dtype(moved).itemsize, result_dtype.itemsize),
    )
    done = exchanged(functions, list(members), shards, route, (dtype, result_dtype))
    results: list[Any] = [None] * len(local)
    for kind, whole in zip(members.values(), done, strict=True):
        stop = 0
        for i in kind:
            start, stop = stop, stop + len(items[i])
            results[i] = _from_items(whole[start:stop], local[i])
    return results


def _items(p: Placed) -> jax.Array:
    """``(items, numbers)``: this device's shards at each index of its part of the batch axes."""
    moved = p.array.transpose(p.view.batch_axes + p.view.matrix_axes)
    return moved.reshape(math.prod(p.array.shape[axis] for axis in p.view.batch_axes), -1)


def _from_items(items: jax.Array, p: Placed) -> jax.Array:
    """The inverse of :func:`_items`."""
    order = p.view.batch_axes + p.view.matrix_axes
    moved = items.reshape([p.array.shape[axis] for axis in order])
    return moved.transpose([order.index(axis) for axis in range(len(order))])


def _narrower(dtype: Any, moved_as: Any) -> Any:
    """``moved_as`` if every number of ``dtype`` has its size there, and takes less memory."""
    if moved_as is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    have, want = jnp.finfo(dtype), jnp.finfo(moved_as)
    return moved_as if want.bits < have.bits and want.nexp >= have.nexp else dtype
