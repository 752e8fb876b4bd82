"""Cuts arrays over replicas, and gathers them in one collective."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from optax_muonplus._execution.batches import cut_into_chunks, group_by
from optax_muonplus._execution.mesh.plan import BUCKET_BYTES
from optax_muonplus._execution.mesh.shards import from_lines, in_lines
from optax_muonplus._leaves.placement import LeafSharding, as_named, usable_axes


class Cut(NamedTuple):
    """One axis of an array, cut along more mesh axes: each device has a part of its shard."""

    whole: LeafSharding  # of the array before
    axis: int
    names: tuple[str, ...]  # mesh axes, behind those that already cut the axis; may be empty

    @property
    def sharding(self) -> LeafSharding:
        mesh, spec = self.whole
        entry, after = spec[self.axis : self.axis + 1], spec[self.axis + 1 :]
        return LeafSharding(mesh, (*spec[: self.axis], *(x + self.names for x in entry), *after))


def cut_to(x: jax.Array, sharding: LeafSharding) -> jax.Array:
    """Reshards ``x`` where ``sharding`` only adds minor mesh axes, which moves nothing."""
    typed = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types and not typed.mesh.empty:
        x = jax.sharding.reshard(x, as_named(sharding, [AxisType.Explicit]))
    if AxisType.Auto in sharding.mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, as_named(sharding, [AxisType.Auto]))
    return x


@functools.partial(jax.jit, static_argnums=1, inline=True)
def gather(parts: Sequence[jax.Array], cuts: tuple[Cut, ...]) -> list[jax.Array]:
    """Returns the whole arrays of ``parts``, at least one."""
    mesh = cuts[0].whole.mesh

    def on_each_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        results: dict[int, jax.Array] = {}
        # Arrays of one dtype, cut along the same mesh axes, travel in one all-gather per bucket.
        for group in group_by(range(len(shards)), lambda i: (cuts[i].names, shards[i].dtype)):
            names = cuts[group[0]].names
            replicas = math.prod(mesh.shape[name] for name in names)
            nbytes = [shards[i].nbytes * replicas for i in group]
            for bucket in cut_into_chunks(group, nbytes, BUCKET_BYTES):
                lines = [in_lines(shards[i].reshape(-1)) for i in bucket]
                gathered = jax.lax.all_gather(jnp.concatenate(lines), names)
                stop = 0
                for i, part in zip(bucket, lines, strict=True):
                    start, stop = stop, stop + len(part)
                    x, axis, shape = gathered[:, start:stop], cuts[i].axis, [*shards[i].shape]
                    pieces = from_lines(x, shards[i].size).reshape(replicas, *shape)
                    shape[axis] *= replicas
                    results[i] = jnp.moveaxis(pieces, 0, axis).reshape(shape)
        return tuple(results[i] for i in range(len(shards)))

    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=tuple(as_named(cut.sharding).spec for cut in cuts),
        out_specs=tuple(as_named(cut.whole).spec for cut in cuts),
        axis_names=set(usable_axes(mesh)),
        check_vma=False,  # it cannot see that gathered arrays are equal on all devices
    )
    return list(mapped(*parts))
