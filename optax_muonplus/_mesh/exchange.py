"""Sharded matrices brought together, worked on whole, and sent home: two moves, however many.

All matrices that are cut along the same mesh axes travel together. Each device packs its shards in
one row for each worker, an all-to-all exchanges the rows, the workers put their matrices together
and work on them, and the way home is the same in reverse. Who works on what is planned beforehand,
see ``routes``; nothing moves while work is done.

These are explicit collectives under ``jax.shard_map``. Sharding constraints on a stack made the
compiler gather all of it ("involuntary full rematerialization") on a 4 x 2 mesh.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._mesh.routes import Route
from optax_muonplus._mesh.schedule import Block, Shipment, Slot, Stock
from optax_muonplus._parameters.dimension_numbers import MatrixView
from optax_muonplus.matrices._batching import Stored, apply_grouped
from optax_muonplus.matrices._matrix_function import MatrixFunction


@dataclasses.dataclass(frozen=True)
class Kind:
    """What items have in common; an item is one index of a parameter's batch axes.

    Attributes:
      view: the view of one item, as :meth:`MatrixView.stacked` gives it.
      axes: the mesh axes that each axis of an item is cut along.
      sizes: of all mesh axes, as pairs.
    """

    view: MatrixView
    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's shard of an item."""
        return tuple(
            n // math.prod(self._grid(names))
            for n, names in zip(self.view.shape[1:], self.axes, strict=True)
        )

    def stock(self, count: int, functions: Sequence[MatrixFunction]) -> Stock:
        """``count`` items to apply ``functions`` to, as the planner counts them."""
        shapes = [shape[1:] for shape in self.view.block_shapes()]
        operations = math.prod(self.view.shape)  # one for each number, if nothing else
        operations += sum(f.operations(shape) for shape in shapes for f in functions)
        sides = tuple((min(shape), max(shape)) for shape in shapes)
        return Stock(count, math.prod(self.local_shape), sides, operations)

    def joined(self, shards: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """Items ``(count, *shape)`` of shards ``(devices along names, count, numbers)``."""
        shape = (*self._grid(names), shards.shape[1], *self.local_shape)
        whole = shards.reshape(shape).transpose(self._order(names))
        return whole.reshape(-1, *self.view.shape[1:])

    def cut(self, items: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """The inverse of :meth:`joined`."""
        shape = [len(items)]
        for cuts, n in zip(self.axes, self.local_shape, strict=True):
            shape += [*self._grid(cuts), n]
        shards = items.reshape(shape).transpose(np.argsort(self._order(names)))
        return shards.reshape(math.prod(self._grid(names)), len(items), -1)

    def _grid(self, names: tuple[str, ...]) -> list[int]:
        return [dict(self.sizes)[name] for name in names]

    def _order(self, names: tuple[str, ...]) -> list[int]:
        """From (mesh axes, count, axes of a shard) to (count, each axis with its mesh axes)."""
        order = [len(names)]
        for i, cuts in enumerate(self.axes):
            order += [*(names.index(name) for name in cuts), len(names) + 1 + i]
        return order


def exchanged(
    functions: Sequence[MatrixFunction],
    kinds: Sequence[Kind],
    shards: Sequence[jax.Array],
    route: Route,
    dtypes: tuple[Any, Any],
) -> list[jax.Array]:
    """``functions`` of all items; runs on each device of a mesh, inside ``jax.shard_map``.

    Args:
      functions: shape-preserving, applied one after the other.
      kinds: the kinds of items.
      shards: for each kind the shards that this device holds, ``(count, numbers)``.
      route: the plan for these counts.
      dtypes: in which the functions work, and in which results go home.

    Returns:
      Arrays like ``shards``.
    """
    dtype, result_dtype = dtypes
    parts: list[dict[int, jax.Array]] = [{} for _ in kinds]
    for shipment in route.shipments:
        row = _moved(_pack(shipment, shards, route), route.divided, route.spread, route.gathered)
        row = _work(functions, kinds, shipment, row, route, dtype).astype(result_dtype)
        rows = _moved(row, route.gathered, route.spread, route.divided)
        for block in _blocks(shipment):
            width = block.each * shards[block.kind].shape[1]
            place = rows[block.start : block.stop, block.offset : block.offset + width]
            parts[block.kind][block.first] = place.reshape(block.items, -1)
    return [jnp.concatenate([part[first] for first in sorted(part)]) for part in parts]


def _blocks(shipment: Shipment) -> Iterator[Block]:
    for slot in shipment.slots:
        yield from slot.blocks


def _pack(shipment: Shipment, shards: Sequence[jax.Array], route: Route) -> jax.Array:
    """One row of shards for each worker."""
    rows = jnp.zeros((route.workers, shipment.row), shards[0].dtype)
    for block in _blocks(shipment):
        part = shards[block.kind][block.first : block.first + block.items]
        part = part.reshape(block.stop - block.start, -1)
        rows = jax.lax.dynamic_update_slice(rows, part, (block.start, block.offset))
    return rows


def _moved(
    rows: jax.Array, divided: tuple[str, ...], spread: tuple[str, ...], gathered: tuple[str, ...]
) -> jax.Array:
    """Rows from each device to where they are for, one of each device that they come from.

    The way home is the same with ``divided`` and ``gathered`` exchanged: replicas that divide the
    work gather its results, and where work was repeated each has what it must send.

    Args:
      rows: one for each device along ``divided`` and ``spread``.
      divided: axes along which devices have the same rows: each sends for those at its own place.
      spread: axes over which rows are exchanged.
      gathered: axes along which all shall have the same.
    """
    if divided:
        rows = rows.reshape(jax.lax.axis_size(divided), -1, rows.shape[-1])
        rows = jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index(divided), 0, False)
    if spread:
        rows = jax.lax.all_to_all(rows, spread, 0, 0, tiled=True)
    if gathered:
        rows = jax.lax.all_gather(rows, gathered, axis=0, tiled=True)
    return rows


def _work(
    functions: Sequence[MatrixFunction],
    kinds: Sequence[Kind],
    shipment: Shipment,
    row: jax.Array,
    route: Route,
    dtype: Any,
) -> jax.Array:
    """The results, in the places of what they are made of."""
    names = route.gathered + route.spread
    done = jnp.zeros(row.shape, dtype)
    common = [slot.blocks[0] for slot in shipment.slots if _is_common(slot, route)]
    stored, views = [], []
    for block in common:
        kind = kinds[block.kind]
        shards = row[:, block.offset : block.offset + block.each * math.prod(kind.local_shape)]
        shards = shards.reshape(len(row), block.each, -1).astype(dtype)
        items = kind.joined(shards, names)
        views.append(kind.view.stacked(block.each))
        stored.append([Stored(x, kind.view.transposed) for x in views[-1].to_matrices(items)])
    results = iter(apply_grouped(functions, [matrix for item in stored for matrix in item]))
    for block, view, matrices in zip(common, views, stored, strict=True):
        items = view.from_matrices([next(results) for _ in matrices])
        shards = kinds[block.kind].cut(items, names).reshape(len(row), -1)
        done = jax.lax.dynamic_update_slice(done, shards, (0, block.offset))
    for slot in shipment.slots:
        if not _is_common(slot, route):
            done = _work_on_own(functions, kinds, slot, row, done, route)
    return done


def _is_common(slot: Slot, route: Route) -> bool:
    """Whether all workers have the same there."""
    return len(slot.blocks) == 1 and slot.blocks[0].stop - slot.blocks[0].start == route.workers


def _work_on_own(
    functions: Sequence[MatrixFunction],
    kinds: Sequence[Kind],
    slot: Slot,
    row: jax.Array,
    done: jax.Array,
    route: Route,
) -> jax.Array:
    """Works on a slot in which each worker has an item of a kind of its own, or none."""
    present = sorted({block.kind for block in slot.blocks})
    readers = [
        _Reader(kinds[kind], route.gathered + route.spread, len(present) > 1) for kind in present
    ]
    table = np.zeros((3, route.workers), np.int32)
    for block in slot.blocks:
        entry = [1, present.index(block.kind), block.offset]
        table[:, block.start : block.stop] = np.array(entry)[:, None]
    worker = jax.lax.axis_index(route.divided + route.spread)
    has, which, offset = jnp.asarray(table)[:, worker]

    def work(shards: jax.Array) -> jax.Array:
        matrices = jax.lax.switch(which, [reader.read for reader in readers], shards)
        for function in functions:
            matrices = [
                function.of(_one_of([reader.transposed[i] for reader in readers], which))(x)
                for i, x in enumerate(matrices)
            ]
        return jax.lax.switch(which, [reader.write for reader in readers], matrices)

    size = math.prod(kinds[present[0]].local_shape)
    shards = jax.lax.dynamic_slice_in_dim(row, offset, size, 1).astype(done.dtype)
    if table[0].all():
        results = work(shards)
    else:
        idle = jax.lax.dynamic_slice_in_dim(done, offset, size, 1)
        results = jax.lax.cond(has == 1, work, lambda _: idle, shards)
    return jax.lax.dynamic_update_slice_in_dim(done, results, offset, 1)


def _one_of(choices: Sequence[bool], which: jax.Array) -> bool | jax.Array:
    return choices[0] if len(set(choices)) == 1 else jnp.asarray(choices)[which]


class _Reader:
    """One item of a kind as matrices, and back; tall ones turned where kinds must look alike."""

    def __init__(self, kind: Kind, names: tuple[str, ...], turned: bool):
        self.kind = kind
        self.names = names
        self.turned = [turned and _is_tall(shape, kind.view) for shape in kind.view.block_shapes()]
        self.transposed = [kind.view.transposed != turned for turned in self.turned]

    def read(self, shards: jax.Array) -> list[jax.Array]:
        items = self.kind.joined(shards[:, None], self.names)
        return self._turn(self.kind.view.to_matrices(items))

    def write(self, matrices: list[jax.Array]) -> jax.Array:
        items = self.kind.view.from_matrices(self._turn(matrices))
        return self.kind.cut(items, self.names)[:, 0]

    def _turn(self, matrices: list[jax.Array]) -> list[jax.Array]:
        return [
            jnp.swapaxes(x, -1, -2) if turned else x
            for x, turned in zip(matrices, self.turned, strict=True)
        ]


def _is_tall(shape: tuple[int, int, int], view: MatrixView) -> bool:
    """Whether the matrix as it is stored has more rows than columns."""
    _, rows, columns = shape
    return columns > rows if view.transposed else rows > columns
