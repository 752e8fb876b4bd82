"""What is decided about sharded matrices before anything is traced, as one value.

A worked example. Two devices shard three matrices of 64 x 64 by rows (``P("x")``). A shard has 2048
elements, which are sent as 16 lines of 128.

- All three are alike, so that they form one :class:`MatrixGroup`, and travel over the same axes in
  the same dtypes, so that they form one :class:`CommGroup`.
- Three matrices on two workers: one for each worker, and one left over, for worker 0. The schedule
  has two tasks: one that both workers have (matrices 0 and 1, lines 0 to 15 of the buffers), and
  one that worker 0 has alone (matrix 2, lines 16 to 31). All fit into one bucket, whose row is 32.
- Each device packs a send buffer ``(2 workers, 32, 128)``::

      for worker 0: [its shard of matrix 0 | its shard of matrix 2]
      for worker 1: [its shard of matrix 1 | anything            ]

- One all-to-all exchanges the rows. Worker 0 then has ``(2 senders, 32, 128)``: both shards of
  matrix 0 and both of matrix 2; it joins them to whole matrices and works on them, while worker 1
  works on matrix 1. The second all-to-all sends the results back the same way, in the same places.
- The loads are 2 and 1 matrices. A device receives 32 lines each way.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus.frame import LeafInfo, LeafSharding, MatrixLayout, usable_axes
from optax_muonplus.method import MatrixFunction, narrower
from optax_muonplus.run.polar import for_platform
from optax_muonplus.run.routes import MeshAxes, Route, cheapest_route
from optax_muonplus.run.schedule import LINE, GroupSize

Axes = tuple[tuple[str, ...], ...]  # the mesh axes that cut each axis of an array


@dataclasses.dataclass(frozen=True)
class MatrixGroup:
    """Items that are alike; an item is one index of a parameter's batch axes."""

    layout: MatrixLayout  # of one item, as MatrixLayout.stacked gives it
    axes: Axes  # of an item
    sizes: tuple[tuple[str, int], ...]  # of all mesh axes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's shard of an item."""
        pairs = zip(self.layout.shape[1:], self.axes, strict=True)
        return tuple(n // math.prod(self._grid(names)) for n, names in pairs)

    def size(self, count: int, functions: Sequence[MatrixFunction]) -> GroupSize:
        """``count`` items to apply ``functions`` to, as the schedule counts them."""
        blocks = self.layout.block_shapes()
        shapes = [(rows, columns) for batch, rows, columns in blocks for _ in range(batch)]
        flops = math.prod(self.layout.shape)  # one for each element, if nothing else
        flops += sum(f.flops(shape) for shape in shapes for f in functions)
        sides = tuple((min(shape), max(shape)) for shape in shapes)
        return GroupSize(count, -(-math.prod(self.local_shape) // LINE), sides, flops)

    def join(self, shards: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """Items ``(count, *shape)`` of shards ``(devices along names, count, elements)``."""
        shape = (*self._grid(names), shards.shape[1], *self.local_shape)
        whole = shards.reshape(shape).transpose(self._order(names))
        return whole.reshape(-1, *self.layout.shape[1:])

    def cut(self, items: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """The inverse of :meth:`join`."""
        shape = [len(items)]
        for axes, n in zip(self.axes, self.local_shape, strict=True):
            shape += [*self._grid(axes), n]
        shards = items.reshape(shape).transpose(np.argsort(self._order(names)))
        return shards.reshape(math.prod(self._grid(names)), len(items), -1)

    def _grid(self, names: tuple[str, ...]) -> list[int]:
        return [dict(self.sizes)[name] for name in names]

    def _order(self, names: tuple[str, ...]) -> list[int]:
        """From (mesh axes, count, axes of a shard) to (count, each axis with its mesh axes)."""
        order = [len(names)]
        for i, axes in enumerate(self.axes):
            order += [*(names.index(name) for name in axes), len(names) + 1 + i]
        return order


class Member(NamedTuple):
    """One array on the mesh, whose elements may have another dtype than its record says."""

    layout: MatrixLayout
    sharding: LeafSharding
    dtype: Any  # of the array; the work is done in it
    result_dtype: Any

    @classmethod
    def of(cls, leaf: LeafInfo, dtype: Any) -> "Member":
        """Describes the array of a leaf, results of which have the dtype of the record."""
        assert leaf.layout is not None and leaf.sharding is not None, leaf.name
        return cls(leaf.layout, leaf.sharding, dtype, leaf.dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the array, batch axes first."""
        return self.layout.batch_axes + self.layout.matrix_axes

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a shard."""
        mesh, spec = self.sharding
        pairs = zip(self.layout.shape, spec, strict=True)
        return tuple(n // math.prod(mesh.shape[name] for name in names) for n, names in pairs)

    @property
    def local_layout(self) -> MatrixLayout:
        """The layout of a shard that has whole matrices."""
        return dataclasses.replace(self.layout, shape=self.local_shape)

    @property
    def items(self) -> int:
        """How many indices of the batch axes a device has."""
        shape = self.local_shape
        return math.prod(shape[axis] for axis in self.layout.batch_axes)


@dataclasses.dataclass(frozen=True)
class CommGroup:
    """Arrays that travel together: over the same mesh axes, in the same dtypes."""

    members: tuple[tuple[MatrixGroup, list[int]], ...]  # with the indices of the arrays
    route: Route
    transfer_dtype: Any  # on the way to the work
    dtype: Any  # of the work
    result_dtype: Any  # on the way back

    @property
    def bytes_received(self) -> int:
        """By a device, both ways."""
        there, back = self.route.elements_received
        return there * self.transfer_dtype.itemsize + back * self.result_dtype.itemsize


def plan(
    members: Sequence[Member], functions: Sequence[MatrixFunction]
) -> tuple[tuple[CommGroup, ...], np.ndarray]:
    """The plan for applying ``functions`` to arrays on one mesh, one at least.

    Arrays travel in the dtype that the first function rounds them to, if it is narrower than theirs
    and has as many exponent bits. The second result is the FLOPs of each device of the mesh.
    """
    functions = [for_platform(function) for function in functions]
    mesh = members[0].sharding.mesh
    sizes = {name: mesh.shape[name] for name in usable_axes(mesh)}
    grouped = _grouped(members, sizes, functions[0].input_dtype)
    group_sizes = {
        key: [
            group.size(sum(members[i].items for i in indices), functions)
            for group, indices in groups.items()
        ]
        for key, groups in grouped.items()
    }
    comm_groups = []
    loads = np.zeros(list(sizes.values()), np.int64)
    # The largest matrices first: smaller ones then fill what they leave uneven.
    for key in sorted(grouped, key=lambda key: -max(size.flops for size in group_sizes[key])):
        sharding, replicas, dtypes = key
        itemsizes = dtypes[0].itemsize, dtypes[2].itemsize
        axes = MeshAxes(sizes, sharding, replicas)
        route = cheapest_route(group_sizes[key], axes, itemsizes, loads)
        loads = route.loads
        comm_groups.append(CommGroup(tuple(grouped[key].items()), route, *dtypes))
    return tuple(comm_groups), loads


def _grouped(
    members: Sequence[Member], sizes: dict[str, int], transfer_dtype: Any
) -> dict[Any, dict[MatrixGroup, list[int]]]:
    """By (sharding axes, replica axes, dtypes) and group of matrices, indices of ``members``."""
    grouped: dict[Any, dict[MatrixGroup, list[int]]] = {}
    for i, (layout, (_, spec), dtype, result_dtype) in enumerate(members):
        axes = [tuple(name for name in names if sizes[name] > 1) for names in spec]
        item_axes = tuple(axes[axis] for axis in layout.matrix_axes)
        over = {name for names in item_axes for name in names}
        batch = {name for axis in layout.batch_axes for name in axes[axis]}
        sharding = tuple(name for name in sizes if name in over)
        replicas = tuple(name for name in sizes if sizes[name] > 1 and name not in over | batch)
        narrow = narrower(dtype, transfer_dtype)
        dtypes = (jnp.dtype(narrow), jnp.dtype(dtype), jnp.dtype(result_dtype))
        group = MatrixGroup(layout.stacked(1), item_axes, tuple(sizes.items()))
        groups = grouped.setdefault((sharding, replicas, dtypes), {})
        groups.setdefault(group, []).append(i)
    return grouped
