"""Causal attention, also of new tokens over those that came before them.

Glossary of shapes: B rows, T new tokens, S places for tokens, H heads, K width of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.models.config import ModelConfig


class KV(NamedTuple):
    """Keys and values of a layer for the tokens so far, (B, S, H, K); zeros in places to come."""

    keys: jax.Array
    values: jax.Array


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, past: KV | None, start: jax.Array | int
) -> tuple[jax.Array, KV | None]:
    """Values that each new token reads, (B, T, H, K), and `past` with the new tokens in it.

    Without a past the tokens see themselves and those before them in the row. With one, they are
    those from position `start` on, and see all that is in the places up to their own.
    """
    if past is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None
    past = KV(
        jax.lax.dynamic_update_slice_in_dim(past.keys, k, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(past.values, v, start, axis=1),
    )
    new = start + jnp.arange(q.shape[1])
    seen = jnp.arange(past.keys.shape[1])[None] <= new[:, None]  # [T, S]
    return jax.nn.dot_product_attention(q, *past, mask=seen[None, None]), past


def no_tokens(config: ModelConfig, rows: int) -> Any:
    """The past of all layers before the first token: a list, or stacked like the blocks."""
    shape = (rows, config.context, config.n_head, config.d_model // config.n_head)
    empty = jnp.zeros(shape, jnp.dtype(config.compute_dtype))
    if config.scan:
        empty = jnp.zeros((config.n_layer, *shape), empty.dtype)
        return KV(empty, empty)
    return [KV(empty, empty) for _ in range(config.n_layer)]
