"""How many bytes the state of each group takes, on all devices and on one of them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from optax_muonplus.frame import ADAM, MUON, LeafInfo, LeafSharding, ResolvedTree
from optax_muonplus.transforms import Momentum
from optax_muonplus.trees import ShardingTree, StateSharding, layouts


def line_of_bytes(
    tree: ResolvedTree,
    shardings: Sequence[LeafSharding | None],
    sharding: ShardingTree = None,
    state_sharding: StateSharding = None,
    mu_dtype: DTypeLike | None = None,
) -> str:
    """A line with the bytes of the buffers of each group; counts of updates are left out.

    Args:
      tree: the parameters.
      shardings: how they lie.
      sharding: as given to ``muonplus``, like the next two.
      state_sharding: where the state lies, if elsewhere.
      mu_dtype: of the momentum.
    """
    where = shardings
    if state_sharding is not None:
        found = layouts(tree.unflatten(tree.arrays), sharding, state_sharding)
        where = [x.state or own for x, own in zip(found, shardings, strict=True)]
    whole, shard = dict.fromkeys((MUON, ADAM), 0), dict.fromkeys((MUON, ADAM), 0)
    for leaf, known in zip(tree.leaves, where, strict=True):
        for x in _buffers(leaf, mu_dtype) if leaf.known else ():
            whole[leaf.label] += x.size * x.dtype.itemsize
            shard[leaf.label] += _elements_of_a_shard(x.shape, known) * x.dtype.itemsize
    text = f"bytes of state: {_shown(whole)}"
    return f"{text}; on each device {_shown(shard)}" if any(where) else text


def _shown(numbers: dict[str, int]) -> str:
    return ", ".join(f"{group} {number:,}" for group, number in numbers.items())


def _buffers(leaf: LeafInfo, mu_dtype: DTypeLike | None) -> list[Any]:
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if leaf.layout is None:
        return [like, like]  # of AdamW
    return jax.tree.leaves(jax.eval_shape(Momentum(mu_dtype=mu_dtype).init, like))


def _elements_of_a_shard(shape: tuple[int, ...], sharding: LeafSharding | None) -> int:
    """Axes of scales that do not divide are not cut."""
    if sharding is None:
        return math.prod(shape)
    mesh, spec = sharding
    counts = [math.prod(mesh.shape[name] for name in names) for names in spec]
    return math.prod(n if n % k else n // k for n, k in zip(shape, counts, strict=True))
