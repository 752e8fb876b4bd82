"""What a recorder measures: the matrices at each stage inside of a chain."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_muonplus import transforms
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import FusedLink, LeafInfo


def polar_link(transformation: Any) -> FusedLink:
    """Returns the first link of a chain, and checks that it is a momentum with its polar factor."""
    first = next(iter(transforms.links_of(transformation)), None)
    averages = isinstance(first, FusedLink) and first.momentum is not None
    if averages and isinstance(first.functions[0], Orthogonalize):
        return first
    raise ValueError(
        "recorded knows the inside of chains that begin with a momentum and its polar factor, as"
        " those of omp.muonplus, omp.muon and omp.scale_by_muonplus do. For any other optimizer, or"
        " a link of a chain, there is watched."
    )


def stages_of(
    link: FusedLink, leaves: Sequence[LeafInfo], updates: Any, state: Any, results: Any
) -> Callable[[], Sequence[Sequence[jax.Array]]]:
    """Returns a function that makes momenta, polar factors and updates of ``leaves``.

    The function runs at recorded updates only. It reads the new momentum, which is in memory
    anyway: the update overwrites the old one, which would have to be copied at every update.
    """
    del results
    assert link.momentum is not None
    gradients = arrays_of(leaves, updates)
    momentum = link.momentum
    if isinstance(state, optax.PartitionState):  # what updates the rest may have a momentum too
        state = state.inner_states["muon"]
    old = transforms.find_momentum(state, as_stored=True)
    mu = type(old)(*(arrays_of(leaves, tree) for tree in old[:-1]), old.count)
    # A state over replicas is cut on: so is the gradient, and the momentum is gathered when read.
    parts = [_typed_like(x, stored) for x, stored in zip(gradients, mu[0], strict=True)]
    _, directions = momentum.advance(parts, mu, link.program.input_dtype)
    # Measures are of what the steps compute, not of what the updates are rounded to.
    whole = FusedLink.of(None, link.functions, rounds=False, run=link.run)

    def after(steps: Sequence[Any], arrays: Any) -> Any:
        if not steps:
            return arrays
        part = dataclasses.replace(whole, program=type(whole.program).of(steps))
        return part.update(arrays, None, None, leaves)[0]

    def stages() -> Sequence[Sequence[jax.Array]]:
        momenta = [_typed_like(x.load(), g) for x, g in zip(directions, gradients, strict=True)]
        factors = after(whole.functions[:1], momenta)
        if isinstance(whole.program.functions[0], Orthogonalize):
            return momenta, factors, after(whole.program.functions[1:], factors)
        # The dual norm is an inner product with the momentum: one step makes all of it.
        return momenta, factors, after(whole.program.functions, momenta)

    return stages


def arrays_of(leaves: Sequence[LeafInfo], tree: Any) -> list[jax.Array]:
    """Returns the arrays of ``tree`` at the paths of ``leaves``."""
    paths, arrays, _ = transforms.flatten_tree(tree)
    by_path = dict(zip(paths, arrays, strict=True))
    return [by_path[leaf.path] for leaf in leaves]


def _typed_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns ``x``, on Explicit axes with the sharding of ``other``'s type."""
    typed = jax.typeof(other).sharding
    is_explicit = jax.sharding.AxisType.Explicit in typed.mesh.axis_types
    if not is_explicit or jax.typeof(x).sharding == typed:
        return x
    return jax.sharding.reshard(x, typed)
