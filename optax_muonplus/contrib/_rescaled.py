"""A base of rules that divide rows or entries of a polar factor by their running sizes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from optax_muonplus import transforms
from optax_muonplus.transforms import LeafInfo, Link, MatrixLayout, Run


class RescaledState(NamedTuple):
    """State of a rule that rescales a polar factor."""

    momentum: Any  # a MomentumState, with one buffer for each matrix
    nu: optax.Updates  # running mean of squares


class Rescaled(Link):
    """A momentum, its polar factor O, and ``rescaled(layout, O, nu)`` with a running mean nu."""

    state = RescaledState  # the class of the state

    def with_run(self, run: Run) -> "Rescaled":
        return dataclasses.replace(self, run=run)  # ty: ignore[invalid-argument-type]

    @property
    def polar_step(self) -> transforms.FusedLink:
        """The momentum and its polar factor, which is not rounded before it is squared."""
        raise NotImplementedError

    def start(self, layout: MatrixLayout, w: jax.Array, mu: jax.Array) -> jax.Array:
        """Returns the first running mean for a block of parameters and of momentum buffers."""
        raise NotImplementedError

    def rescaled(
        self, layout: MatrixLayout, o: jax.Array, nu: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a block of the update and of the next running mean."""
        raise NotImplementedError

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> RescaledState:
        mu, _ = self.polar_step.init(params, leaves)
        buffers = transforms.find_momentum(mu).mu
        return self.state(mu, transforms.map_blocks(self.start, leaves, params, buffers))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, RescaledState]:
        old = state.momentum, optax.EmptyState()
        factors, (mu, _) = self.polar_step.update(updates, old, params, leaves)
        updates, nu = transforms.map_blocks(self.rescaled, leaves, factors, state.nu, n_results=2)
        return updates, self.state(mu, nu)
