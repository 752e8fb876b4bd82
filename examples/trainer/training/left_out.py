"""An optimizer that leaves out steps with a large gradient."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from examples.trainer.training import clipping


def above(
    largest: ArrayLike, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer, but a gradient with a norm above `largest` changes neither state nor params.

    The norm is that of the whole gradient. The state is that of `optimizer`.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        spike = clipping.global_norm(updates) > largest
        updates, after = inner.update(updates, state, params, **extra)
        updates = jax.tree.map(lambda x: jnp.where(spike, jnp.zeros_like(x), x), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(spike, old, new), after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)
