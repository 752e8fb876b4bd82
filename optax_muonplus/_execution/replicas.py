"""Arrays cut over replicas that hold copies of them, and gathered from them in one collective."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType

from optax_muonplus._chain.record import LeafSharding, as_named, usable_axes
from optax_muonplus._execution.batches import chunked, grouped
from optax_muonplus._execution.plan import BUCKET_BYTES
from optax_muonplus._execution.sharded_leaf import from_lines, in_lines

Spec = tuple[tuple[str, ...], ...]


def added_axes(cut: LeafSharding, whole: LeafSharding) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes that ``cut`` adds to each axis, behind those that cut it already.

    None if it does anything else: then a device's part is not in its shard of the whole.
    """
    pairs = list(zip(cut.spec, whole.spec, strict=True))
    if any(names != more[: len(names)] for more, names in pairs):
        return None
    return tuple(more[len(names) :] for more, names in pairs)


def moved_to(x: jax.Array, sharding: LeafSharding) -> jax.Array:
    """Shards ``x`` so; each device cuts what it has where ``sharding`` only adds minor axes."""
    typed = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types and not typed.mesh.empty:
        x = jax.sharding.reshard(x, as_named(sharding, [AxisType.Explicit]))
    if AxisType.Auto in sharding.mesh.axis_types:
        x = jax.lax.with_sharding_constraint(x, as_named(sharding, [AxisType.Auto]))
    return x


def gather(
    arrays: Sequence[jax.Array],
    cut: Sequence[LeafSharding],
    whole: Sequence[LeafSharding],
) -> list[jax.Array]:
    """Arrays that lie as ``cut`` says, moved to lie as ``whole``.

    Where the first only adds minor mesh axes to the second, all arrays of one dtype that are cut
    along the same axes travel in one all-gather over them, ``BUCKET_BYTES`` at a time. Others are
    left to the compiler.
    """
    added = [added_axes(*pair) for pair in zip(cut, whole, strict=True)]
    results = {i: moved_to(x, whole[i]) for i, x in enumerate(arrays) if added[i] is None}
    packed = [i for i in range(len(arrays)) if i not in results]
    if packed:
        static = tuple((cut[i], whole[i], added[i]) for i in packed)
        chosen = [arrays[i] for i in packed]
        traced = any(isinstance(x, jax.core.Tracer) for x in chosen)
        results |= zip(packed, (_gather if traced else _compiled)(chosen, static), strict=True)
    return [results[i] for i in range(len(arrays))]


def _gather(arrays: Sequence[jax.Array], static: tuple[Any, ...]) -> list[jax.Array]:
    cut, whole, added = zip(*static, strict=True)
    mesh = cut[0].mesh
    sizes = [math.prod(mesh.shape[name] for names in spec for name in names) for spec in added]

    def on_each_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        results: dict[int, jax.Array] = {}
        for group in grouped(range(len(shards)), lambda i: (_axes(added[i]), shards[i].dtype)):
            nbytes = [shards[i].nbytes * sizes[i] for i in group]
            for bucket in chunked(group, nbytes, BUCKET_BYTES):
                parts = [in_lines(shards[i].reshape(-1)) for i in bucket]
                axes = _axes(added[bucket[0]])
                lines = jax.lax.all_gather(jnp.concatenate(parts), axes)
                stop = 0
                for i, part in zip(bucket, parts, strict=True):
                    start, stop = stop, stop + len(part)
                    pieces = from_lines(lines[:, start:stop], shards[i].size)
                    results[i] = _joined(pieces, shards[i].shape, added[i], mesh.shape)
        return tuple(results[i] for i in range(len(shards)))

    mapped = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=tuple(as_named(x).spec for x in cut),
        out_specs=tuple(as_named(x).spec for x in whole),
        axis_names=set(usable_axes(mesh)),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    return list(mapped(*arrays))


_compiled = jax.jit(_gather, static_argnums=1)


def _axes(added: Spec) -> tuple[str, ...]:
    return tuple(name for names in added for name in names)


def _joined(pieces: jax.Array, shape: tuple[int, ...], added: Spec, sizes: Any) -> jax.Array:
    """Pieces ``(devices along the added axes, elements)`` as one array."""
    names = _axes(added)
    x = pieces.reshape(*(sizes[name] for name in names), *shape)
    order, whole = [], []
    for i, (size, more) in enumerate(zip(shape, added, strict=True)):
        order += [*(names.index(name) for name in more), len(names) + i]
        whole.append(size * math.prod(sizes[name] for name in more))
    return x.transpose(order).reshape(whole)
