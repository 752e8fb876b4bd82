"""The bytes of the state of each group, on all devices and on one of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from optax_muonplus.extras.zero1 import find_shardings
from optax_muonplus.frame import ADAM, MUON, LeafInfo, LeafSharding, ResolvedTree
from optax_muonplus.transforms import Momentum


def line_of_bytes(
    tree: ResolvedTree, shardings: Sequence[LeafSharding | None], given: Mapping[str, Any]
) -> str:
    """Returns a line with the bytes of the buffers of each group; counts are left out.

    Args:
      tree: the parameters.
      shardings: their shardings.
      given: the arguments of ``muonplus``.
    """
    where = shardings
    if given["state_sharding"] is not None:
        params = tree.unflatten(tree.arrays)
        found = find_shardings(params, given["sharding"], given["state_sharding"])
        where = [x.state or own for x, own in zip(found, shardings, strict=True)]
    whole, shard = dict.fromkeys((MUON, ADAM), 0), dict.fromkeys((MUON, ADAM), 0)
    for leaf, known in zip(tree.leaves, where, strict=True):
        for x in _buffers(leaf, given) if leaf.known else ():
            whole[leaf.label] += x.size * x.dtype.itemsize
            shard[leaf.label] += _elements_of_a_shard(x.shape, known) * x.dtype.itemsize
    lines = [", ".join(f"{group} {n:,}" for group, n in x.items()) for x in (whole, shard)]
    return f"bytes of state: {lines[0]}" + f"; on each device {lines[1]}" * any(where)


def _buffers(leaf: LeafInfo, given: Mapping[str, Any]) -> list[Any]:
    """Returns the shapes of the momentum of a matrix, or of the state that the others have."""
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    others = optax.scale_by_adam() if given["others"] is None else given["others"]
    rule = others if leaf.layout is None else Momentum(mu_dtype=given["mu_dtype"])
    return [x for x in jax.tree.leaves(jax.eval_shape(rule.init, like)) if x.ndim]


def _elements_of_a_shard(shape: tuple[int, ...], sharding: LeafSharding | None) -> int:
    """Counts what one device has; axes of scales that do not divide are not cut."""
    if sharding is None:
        return math.prod(shape)
    mesh, spec = sharding
    counts = [math.prod(mesh.shape[name] for name in names) for names in spec]
    return math.prod(n if n % k else n // k for n, k in zip(shape, counts, strict=True))
