"""The training and validation loss."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike


def next_token_loss(logits: jax.Array, targets: ArrayLike) -> jax.Array:
    """Mean cross-entropy in nats per token; logits (B, T, V), targets (B, T)."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
