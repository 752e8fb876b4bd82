"""Causal attention, with or without a KV cache of earlier tokens.

Glossary of shapes: B rows, T new tokens, S positions in the cache, H heads, K width of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.trainer.models.attention_kernels import KERNELS, choose
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig, head_size


class KV(NamedTuple):
    """The KV cache of one layer, (B, S, H, K); zeros at positions that are not filled yet."""

    keys: jax.Array
    values: jax.Array


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: KV | None,
    start: jax.Array | int,
    config: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, KV | None]:
    """The attention output for each new token, (B, T, H, K), and the cache with the new tokens.

    Without a cache, each token attends to itself and to earlier tokens of its row, by the kernel
    that `config` asks for. With a cache, the new tokens have the positions from `start` on, and
    attend to all positions up to their own.
    """
    t = q.shape[1]
    if kv_cache is None or (isinstance(start, int) and start == 0 and t == kv_cache.keys.shape[1]):
        kernel = KERNELS[choose(config, layout, t).kernel]
        mixed = layout.divide(kernel, ("batch", None, "heads", None), q, k, v)
        return mixed, None if kv_cache is None else KV(k, v)  # which fill the cache
    kv_cache = KV(
        jax.lax.dynamic_update_slice_in_dim(kv_cache.keys, k, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(kv_cache.values, v, start, axis=1),
    )
    new = start + jnp.arange(t)
    seen = jnp.arange(kv_cache.keys.shape[1])[None] <= new[:, None]  # [T, S]
    return jax.nn.dot_product_attention(q, *kv_cache, mask=seen[None, None]), kv_cache


def empty_kv_cache(config: ModelConfig, rows: int) -> Any:
    """The cache of all layers before the first token: a list, or stacked like the blocks."""
    shape = (rows, config.context, config.n_head, head_size(config))
    empty = jnp.zeros(shape, jnp.dtype(config.compute_dtype))
    if config.scan:
        empty = jnp.zeros((config.n_layer, *shape), empty.dtype)
        return KV(empty, empty)
    return [KV(empty, empty) for _ in range(config.n_layer)]
