"""States sharded like the parameters that they belong to."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muonplus._parameters.paths import Path, flatten_tree
from optax_muonplus._parameters.sharding import axes_of_type, concrete_sharding, spec_entries


def shard_like_params(
    state: Any,
    paths: Sequence[Path],
    shapes: Sequence[tuple[int, ...]],
    given: Sequence[NamedSharding | None],
) -> Any:
    """``state``, with every leaf that mirrors a parameter sharded like that parameter.

    A leaf mirrors a parameter if its path ends in the parameter's and it has its shape. Under
    ``jax.jit`` on Auto axes the zeros of a state would else be made on one device.

    Args:
      state: of a transformation.
      paths: of the parameters.
      shapes: of the parameters.
      given: for each parameter its entry in the argument ``sharding``.
    """
    params = {
        path: (shape, argument)
        for path, shape, argument in zip(paths, shapes, given, strict=True)
        if argument is not None
    }
    if not params:
        return state

    def constrained(path: Path, leaf: Any) -> Any:
        suffixes = (path[i:] for i in range(len(path) + 1))
        shape, argument = next((params[s] for s in suffixes if s in params), (None, None))
        if argument is None or np.shape(leaf) != shape:
            return leaf
        return _constrained(leaf, argument)

    state_paths, leaves, unflatten = flatten_tree(state)
    return unflatten(map(constrained, state_paths, leaves))


def _constrained(leaf: Any, given: NamedSharding) -> Any:
    """``leaf`` sharded over the Auto axes of ``given``; its type shards it over Explicit ones."""
    actual = concrete_sharding(leaf)
    auto = axes_of_type(given.mesh, AxisType.Auto)
    inside = axes_of_type(jax.typeof(leaf).sharding.mesh, AxisType.Manual)
    if not auto or inside or (actual is not None and actual.is_equivalent_to(given, leaf.ndim)):
        return leaf
    spec = [tuple(name for name in names if name in auto) for names in spec_entries(given.spec)]
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(given.mesh, PartitionSpec(*spec)))
