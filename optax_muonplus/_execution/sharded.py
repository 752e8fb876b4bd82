"""Functions on matrices that lie in shards on a mesh, each matrix whole on one of its devices."""

import math
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_muonplus._execution.batches import Read, dtypes_of
from optax_muonplus._execution.exchange import exchange
from optax_muonplus._execution.hyperparams import StaticPart, split_arrays
from optax_muonplus._execution.lines import from_lines, in_lines
from optax_muonplus._execution.plan import CommGroup, Member, plan
from optax_muonplus._parameters import (
    LeafInfo,
    usable_axes,
)
from optax_muonplus._xla.loops import Sources, stacked
from optax_muonplus.matrices._matrix_function import MatrixFunction
from optax_muonplus.matrices._precision import narrowed


def apply_sharded(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix.

    Args:
      functions: functions of matrices. Matrices travel in the dtype that the first one rounds them
        to, if it is narrower than theirs and has as many exponent bits. Results equal those of
        rounding after the transfer.
      read: from the arrays in a tuple to the matrices that travel.
      sources: for each leaf the arrays that its matrices are made of; all on one mesh.
      leaves: the records, one at least. Results have their dtypes.

    Returns:
      One array for each leaf, in order, sharded as its sources.
    """
    hyperparams, rest = split_arrays((read, list(functions)))
    members = tuple(map(Member, leaves, dtypes_of(read, sources)))
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(sources))
    apply = _apply if traced else _compiled
    return apply(hyperparams, *sources, rest=rest, members=members)


def _apply(
    hyperparams: Sequence[jax.Array],
    *sources: Sources,
    rest: StaticPart,
    members: tuple[Member, ...],
) -> list[jax.Array]:
    specs = tuple(PartitionSpec(*(names or None for names in x.spec)) for x in members)
    planned = plan(members, rest.merge(hyperparams)[1])

    def on_each_device(hyperparams: Sequence[jax.Array], *shards: Sources) -> tuple[jax.Array, ...]:
        read, functions = rest.merge(hyperparams)
        results: dict[int, jax.Array] = {}
        for comm_group in planned.groups:
            results |= _exchanged(functions, read, comm_group, shards, members)
        return tuple(results[i] for i in range(len(members)))

    mapped = jax.shard_map(
        on_each_device,
        mesh=members[0].mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=specs,
        axis_names=set(usable_axes(members[0].mesh)),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    return list(mapped(hyperparams, *sources))


# Outside of jit every operation would be a program of its own, and compiled anew at every call.
_compiled = jax.jit(_apply, static_argnames=("rest", "members"))


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
        return _to_items(narrowed(read(*shards[i]), comm_group.transfer_dtype), members[i])

    groups = comm_group.members.values()
    items = [_joined([to_items(i) for i in indices]) for indices in groups]
    outputs = exchange(functions, comm_group, items)
    results = {}
    for indices, output in zip(comm_group.members.values(), outputs, strict=True):
        stop = 0
        for i in indices:
            start, stop = stop, stop + members[i].items
            results[i] = _from_items(output[start:stop], members[i])
    return results


def _joined(arrays: list[jax.Array]) -> jax.Array:
    """Items of several arrays in one. A GPU writes them with fewer operations, a TPU in place."""
    return jax.lax.platform_dependent(arrays, tpu=stacked, default=jnp.concatenate)


def _to_items(shard: jax.Array, member: Member) -> jax.Array:
    """A shard as ``(items, lines, 128)``."""
    return in_lines(shard.transpose(member.order).reshape(member.items, -1))


def _from_items(items: jax.Array, member: Member) -> jax.Array:
    """The inverse of :func:`_to_items`."""
    shape = [member.local_shape[axis] for axis in member.order]
    moved = from_lines(items, math.prod(shape) // member.items).reshape(shape)
    return moved.transpose([member.order.index(axis) for axis in range(moved.ndim)])
