"""Functions on matrices that lie in shards on a mesh, each matrix whole on one of its devices."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from optax_muonplus.frame import LeafInfo, as_named, usable_axes
from optax_muonplus.method import MatrixFunction, narrowed
from optax_muonplus.run.batches import Read, dtypes_of
from optax_muonplus.run.exchange import exchange, from_lines, in_lines
from optax_muonplus.run.local import apply_local
from optax_muonplus.run.loops import Sources, concatenated
from optax_muonplus.run.planning import CommGroup, Member, plan


def apply_sharded(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to the matrices of leaves on one mesh.

    ``read`` makes the matrices that travel of the arrays in each tuple of ``sources``. They travel
    in the dtype that the first function rounds them to, if it is narrower than theirs and has as
    many exponent bits; results equal those of rounding after the transfer, have the dtypes of the
    records, and are sharded as the sources.
    """
    # Arrays, which optax.inject_hyperparams makes of hyperparameters, have to be passed to jax.jit
    # and jax.shard_map as arguments. Python numbers stay constants of the program.
    values, structure = jax.tree.flatten((read, list(functions)))
    arrays = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array | np.ndarray)}
    numbers = tuple(None if i in arrays else x for i, x in enumerate(values))
    members = tuple(map(Member.of, leaves, dtypes_of(read, sources)))
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(sources)):
        return _apply(arrays, sources, (structure, numbers), members)
    # Outside of jit every operation would be a program of its own, and compiled anew at every call.
    return _compiled(arrays, sources, (structure, numbers), members)


def _apply(
    arrays: dict[int, jax.Array],
    sources: Sequence[Sources],
    static: tuple[Any, tuple[Any, ...]],
    members: tuple[Member, ...],
) -> list[jax.Array]:
    structure, numbers = static

    def merged(arrays: dict[int, jax.Array]) -> tuple[Read, list[MatrixFunction]]:
        return structure.unflatten([arrays.get(i, x) for i, x in enumerate(numbers)])

    comm_groups, _ = plan(members, merged(arrays)[1])

    def on_each_device(arrays: dict[int, jax.Array], *shards: Sources) -> tuple[jax.Array, ...]:
        read, functions = merged(arrays)
        results: dict[int, jax.Array] = {}
        for comm_group in comm_groups:
            work = _in_place if comm_group.route.stays else _exchanged
            results |= work(functions, read, comm_group, shards, members)
        return tuple(results[i] for i in range(len(members)))

    specs = tuple(as_named(x.sharding).spec for x in members)
    mesh = members[0].sharding.mesh
    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=specs,
        axis_names=set(usable_axes(mesh)),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    return list(mapped(arrays, *sources))


_compiled = jax.jit(_apply, static_argnums=(2, 3))


def _in_place(
    functions: Sequence[MatrixFunction],
    read: Read,
    comm_group: CommGroup,
    shards: Sequence[Sources],
    members: Sequence[Member],
) -> dict[int, jax.Array]:
    """The results for arrays whose matrices are whole on each device, by index."""
    indices = [i for _, group in comm_group.members for i in group]
    layouts = [members[i].local_layout for i in indices]
    dtypes = [(comm_group.dtype, comm_group.result_dtype)] * len(indices)
    made = apply_local(functions, read, [shards[i] for i in indices], layouts, dtypes)
    return dict(zip(indices, made, strict=True))


def _exchanged(
    functions: Sequence[MatrixFunction],
    read: Read,
    comm_group: CommGroup,
    shards: Sequence[Sources],
    members: Sequence[Member],
) -> dict[int, jax.Array]:
    """The results for the arrays in ``comm_group``, by index; on each device."""

    def to_items(i: int) -> jax.Array:
        # Narrowed before it is reshaped, as momentum is where it is stored: one array for both.
        shard = narrowed(read(*shards[i]), comm_group.transfer_dtype)
        return in_lines(shard.transpose(members[i].order).reshape(members[i].items, -1))

    # A GPU joins arrays with fewer operations, a TPU in place.
    join = functools.partial(jax.lax.platform_dependent, tpu=concatenated, default=jnp.concatenate)
    items = [join([to_items(i) for i in indices]) for _, indices in comm_group.members]
    outputs = exchange(functions, comm_group, items)
    results = {}
    for (_, indices), output in zip(comm_group.members, outputs, strict=True):
        stop = 0
        for i in indices:
            start, stop = stop, stop + members[i].items
            results[i] = _from_items(output[start:stop], members[i])
    return results


def _from_items(items: jax.Array, member: Member) -> jax.Array:
    """A shard of ``(items, lines, 128)``."""
    order, local_shape = member.order, member.local_shape
    shape = [local_shape[axis] for axis in order]
    moved = from_lines(items, math.prod(shape) // len(items)).reshape(shape)
    return moved.transpose(np.argsort(order))
