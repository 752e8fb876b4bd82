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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from optax_muonplus._execution.routes import MeshAxes, Route, cheapest_route
from optax_muonplus._execution.schedule import LINE, GroupSize
from optax_muonplus._parameters import LeafInfo, MatrixView, usable_axes
from optax_muonplus.matrices import MatrixFunction, narrower


@dataclasses.dataclass(frozen=True)
class MatrixGroup:
    """Items that are alike; an item is one index of a parameter's batch axes.

    Attributes:
      view: the view of one item, as :meth:`MatrixView.stacked` gives it.
      axes: the mesh axes that each axis of an item is sharded over.
      sizes: of all mesh axes, as pairs.
    """

    view: MatrixView
    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def shard_size(self) -> int:
        """How many elements one device's shard of an item has."""
        return math.prod(self.local_shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's shard of an item."""
        return tuple(
            n // math.prod(self._grid(names))
            for n, names in zip(self.view.shape[1:], self.axes, strict=True)
        )

    def size(self, count: int, functions: Sequence[MatrixFunction]) -> GroupSize:
        """``count`` items to apply ``functions`` to, as the schedule counts them."""
        blocks = self.view.block_shapes()
        shapes = [(rows, columns) for batch, rows, columns in blocks for _ in range(batch)]
        flops = math.prod(self.view.shape)  # one for each element, if nothing else
        flops += sum(f.flops(shape) for shape in shapes for f in functions)
        sides = tuple((min(shape), max(shape)) for shape in shapes)
        return GroupSize(count, -(-self.shard_size // LINE), sides, flops)

    def join(self, shards: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """Items ``(count, *shape)`` of shards ``(devices along names, count, elements)``."""
        shape = (*self._grid(names), shards.shape[1], *self.local_shape)
        whole = shards.reshape(shape).transpose(self._order(names))
        return whole.reshape(-1, *self.view.shape[1:])

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


@dataclasses.dataclass(frozen=True)
class Member:
    """One array on the mesh: its record, and the dtype of its elements, which may differ from it.

    Attributes:
      leaf: the record. Results have its dtype.
      dtype: of the array; the work is done in it.
    """

    leaf: LeafInfo
    dtype: Any

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the array, batch axes first."""
        return self.leaf.matrix.batch_axes + self.leaf.matrix.matrix_axes

    @property
    def spec(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that each axis is sharded over."""
        assert self.leaf.sharding is not None, self.leaf.name
        return self.leaf.sharding.spec

    @property
    def sharded_axes(self) -> tuple[tuple[str, ...], ...]:
        """The same without mesh axes of size 1."""
        assert self.leaf.sharding is not None, self.leaf.name
        return self.leaf.sharding.sharded_axes

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh that it lies on."""
        assert self.leaf.sharding is not None, self.leaf.name
        return self.leaf.sharding.mesh

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a shard."""
        sizes = self.mesh.shape
        return tuple(
            n // math.prod(sizes[name] for name in names)
            for n, names in zip(self.leaf.shape, self.spec, strict=True)
        )

    @property
    def items(self) -> int:
        """How many indices of the batch axes a device has."""
        return math.prod(self.local_shape[axis] for axis in self.leaf.matrix.batch_axes)


@dataclasses.dataclass(frozen=True)
class CommGroup:
    """Arrays that travel together: over the same mesh axes, in the same dtypes.

    Attributes:
      members: each group of matrices in them, with the indices of the arrays.
      route: their route.
      transfer_dtype: on the way to the work.
      dtype: of the work.
      result_dtype: on the way back.
    """

    members: tuple[tuple[MatrixGroup, list[int]], ...]
    route: Route
    transfer_dtype: Any
    dtype: Any
    result_dtype: Any

    @property
    def bytes_received(self) -> int:
        """By a device, both ways."""
        there, back = self.route.elements_received
        return there * self.transfer_dtype.itemsize + back * self.result_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """How matrices travel, and who works on them.

    Attributes:
      groups: what travels together.
      loads: FLOPs of each device of the mesh.
    """

    groups: tuple[CommGroup, ...]
    loads: np.ndarray


def plan(members: Sequence[Member], functions: Sequence[MatrixFunction]) -> Plan:
    """The plan for applying ``functions`` to arrays on one mesh.

    Args:
      members: what is known of the arrays, one at least.
      functions: functions of matrices. Arrays travel in the dtype that the first one rounds them
        to, if it is narrower than theirs and has as many exponent bits.
    """
    mesh = members[0].mesh
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
    return Plan(tuple(comm_groups), loads)


def _grouped(
    members: Sequence[Member], sizes: dict[str, int], transfer_dtype: Any
) -> dict[Any, dict[MatrixGroup, list[int]]]:
    """By (sharding axes, replica axes, dtypes) and group of matrices, indices of ``members``."""
    grouped: dict[Any, dict[MatrixGroup, list[int]]] = {}
    for i, member in enumerate(members):
        view, axes = member.leaf.matrix, member.sharded_axes
        item_axes = tuple(axes[axis] for axis in view.matrix_axes)
        over = {name for names in item_axes for name in names}
        batch = {name for axis in view.batch_axes for name in axes[axis]}
        sharding = tuple(name for name in sizes if name in over)
        replicas = tuple(name for name in sizes if sizes[name] > 1 and name not in over | batch)
        narrow = narrower(member.dtype, transfer_dtype)
        dtypes = (jnp.dtype(narrow), jnp.dtype(member.dtype), jnp.dtype(member.leaf.dtype))
        group = MatrixGroup(view.stacked(1), item_axes, tuple(sizes.items()))
        groups = grouped.setdefault((sharding, replicas, dtypes), {})
        groups.setdefault(group, []).append(i)
    return grouped
