"""Functions on matrices that lie in shards on a mesh, each matrix whole on one of its devices."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from optax_muonplus._mesh.exchange import Kind, exchanged
from optax_muonplus._mesh.routes import Route, cheapest_route
from optax_muonplus._parameters.dimension_numbers import MatrixView
from optax_muonplus._parameters.sharding import Home, usable_axes
from optax_muonplus.matrices._matrix_function import MatrixFunction


class Layout(NamedTuple):
    """What is known of a parameter-sized array on a mesh before its numbers are.

    Attributes:
      view: its matrices.
      home: where it lies.
      dtype: of its numbers.
      result_dtype: of what is made of it.
    """

    view: MatrixView
    home: Home
    dtype: Any
    result_dtype: Any

    @property
    def order(self) -> tuple[int, ...]:
        """Its axes, batch axes first."""
        return self.view.batch_axes + self.view.matrix_axes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a shard."""
        sizes = self.home.mesh.shape
        return tuple(
            n // math.prod(sizes[name] for name in names)
            for n, names in zip(self.view.shape, self.home.spec, strict=True)
        )

    @property
    def items(self) -> int:
        """How many indices of the batch axes a device has."""
        return math.prod(self.local_shape[axis] for axis in self.view.batch_axes)


class Convoy(NamedTuple):
    """Arrays that travel together: along the same mesh axes, in the same dtypes.

    Attributes:
      members: for each kind of matrices in them the indices of the arrays.
      route: their route.
      dtypes: on the way out, at work, and on the way home.
    """

    members: dict[Kind, list[int]]
    route: Route
    dtypes: tuple[Any, Any, Any]


def convoys(
    functions: Sequence[MatrixFunction], layouts: Sequence[Layout], moved_as: Any = None
) -> list[Convoy]:
    """How arrays with these ``layouts`` travel; see :func:`apply_sharded`.

    The last one's route has the loads of all.
    """
    mesh = layouts[0].home.mesh
    sizes = {name: mesh.shape[name] for name in usable_axes(mesh)}
    together: dict[Any, dict[Kind, list[int]]] = {}
    for i, layout in enumerate(layouts):
        cuts = layout.home.cuts
        axes = tuple(cuts[axis] for axis in layout.view.matrix_axes)
        cut = {name for names in axes for name in names}
        batch = {name for axis in layout.view.batch_axes for name in cuts[axis]}
        sharding = tuple(name for name in sizes if name in cut)
        replicas = tuple(name for name in sizes if sizes[name] > 1 and name not in cut | batch)
        dtypes = _narrower(layout.dtype, moved_as), layout.dtype, layout.result_dtype
        kind = Kind(layout.view.stacked(1), axes, tuple(sizes.items()))
        members = together.setdefault((sharding, replicas, dtypes), {})
        members.setdefault(kind, []).append(i)
    stocks = {
        way: [
            kind.stock(sum(layouts[i].items for i in own), functions)
            for kind, own in members.items()
        ]
        for way, members in together.items()
    }
    found = []
    loads = np.zeros(list(sizes.values()), np.int64)
    # The largest matrices first: smaller ones then fill what they leave uneven.
    for way in sorted(together, key=lambda way: -max(stock.operations for stock in stocks[way])):
        sharding, replicas, dtypes = way
        itemsizes = dtypes[0].itemsize, dtypes[2].itemsize
        route = cheapest_route(stocks[way], sharding, replicas, sizes, itemsizes, loads)
        loads = route.loads
        found.append(Convoy(together[way], route, dtypes))
    return found


def apply_sharded(
    functions: Sequence[MatrixFunction],
    arrays: Sequence[jax.Array],
    layouts: Sequence[Layout],
    moved_as: Any = None,
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix of every array.

    Args:
      functions: shape-preserving.
      arrays: all on one mesh.
      layouts: of each array.
      moved_as: dtype on the way to where an array is worked on, if it is narrower than the array's
        and has its exponents. Results travel in their own dtype.

    Returns:
      One array for each of ``arrays``, in order, where that one lies.
    """
    if not arrays:
        return []
    bare = tuple(function._replace(numbers=()) for function in functions)
    numbers = [function.numbers for function in functions]
    static = {"functions": bare, "layouts": tuple(layouts), "moved_as": moved_as}
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return _mapped(numbers, *arrays, **static)
    return _compiled(numbers, *arrays, **static)


def _mapped(
    numbers: Sequence[tuple[jax.Array, ...]],
    *arrays: jax.Array,
    functions: tuple[MatrixFunction, ...],
    layouts: tuple[Layout, ...],
    moved_as: Any,
) -> list[jax.Array]:
    mesh = layouts[0].home.mesh
    specs = tuple(PartitionSpec(*(names or None for names in x.home.spec)) for x in layouts)
    plans = convoys(functions, layouts, moved_as)

    def on_each_device(
        numbers: Sequence[tuple[jax.Array, ...]], *shards: jax.Array
    ) -> tuple[jax.Array, ...]:
        whole = [f._replace(numbers=own) for f, own in zip(functions, numbers, strict=True)]
        results = list(shards)
        for convoy in plans:
            for i, result in _travelled(whole, convoy, shards, layouts).items():
                results[i] = result
        return tuple(results)

    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=specs,
        axis_names=set(usable_axes(mesh)),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    return list(mapped(numbers, *arrays))


# Outside of jit every operation would be a program of its own, and compiled anew at every call.
_compiled = jax.jit(_mapped, static_argnames=("functions", "layouts", "moved_as"))


def _travelled(
    functions: Sequence[MatrixFunction],
    convoy: Convoy,
    shards: Sequence[jax.Array],
    layouts: Sequence[Layout],
) -> dict[int, jax.Array]:
    """The results for the arrays in ``convoy``, by index; on each device."""
    moved, dtype, result_dtype = convoy.dtypes
    items = [
        jnp.concatenate([_to_items(shards[i], layouts[i]) for i in own]).astype(moved)
        for own in convoy.members.values()
    ]
    kinds = list(convoy.members)
    done = exchanged(functions, kinds, items, convoy.route, (dtype, result_dtype))
    results = {}
    for own, whole in zip(convoy.members.values(), done, strict=True):
        stop = 0
        for i in own:
            start, stop = stop, stop + layouts[i].items
            results[i] = _from_items(whole[start:stop], layouts[i])
    return results


def _to_items(shard: jax.Array, layout: Layout) -> jax.Array:
    """``(items, numbers)``."""
    return shard.transpose(layout.order).reshape(layout.items, -1)


def _from_items(items: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of :func:`_to_items`."""
    moved = items.reshape([layout.local_shape[axis] for axis in layout.order])
    return moved.transpose([layout.order.index(axis) for axis in range(moved.ndim)])


def _narrower(dtype: Any, moved_as: Any) -> Any:
    """``moved_as`` if every number of ``dtype`` has its size there, and takes less memory."""
    if moved_as is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    have, want = jnp.finfo(dtype), jnp.finfo(moved_as)
    return moved_as if want.bits < have.bits and want.nexp >= have.nexp else dtype
