"""Causal attention, with or without a KV cache of earlier tokens.

Glossary of shapes: B rows, T new tokens, S positions in the cache, D model width, H heads, G heads
of keys and values, K width of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.attention_kernels import KERNELS, choose
from examples.trainer.models.chunked_attention import largest_logits
from examples.trainer.models.layers import Linear, output_std
from examples.trainer.models.layout import Layout
from examples.trainer.models.rotary import rotate_heads
from examples.trainer.settings.model import ModelConfig, head_size, is_fused, kv_heads


class KV(NamedTuple):
    """The KV cache of one layer, (B, S, G, K); zeros at positions that are not filled yet."""

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
    documents: jax.Array | None = None,
) -> tuple[jax.Array, KV | None]:
    """The attention output for each new token, (B, T, H, K), and the cache with the new tokens.

    Without a cache, each token attends to itself and to earlier tokens of its row, by the kernel
    that `config` asks for; with `documents` (B, T), to those of its document. With a cache, the new
    tokens have the positions from `start` on, and attend to all positions up to their own: who
    keeps documents apart begins a new cache with each.
    """
    t = q.shape[1]
    if kv_cache is None or (isinstance(start, int) and start == 0 and t == kv_cache.keys.shape[1]):
        kernel = KERNELS[choose(config, layout, t).kernel]
        keys, values = (for_each_query(x, q) for x in (k, v))
        masked = () if documents is None else (documents,)
        mixed = layout.divide(kernel, ("batch", None, "heads", None), q, keys, values, *masked)
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
    shape = (rows, config.context, kv_heads(config), head_size(config))
    empty = jnp.zeros(shape, jnp.dtype(config.compute_dtype))
    if config.scan:
        empty = jnp.zeros((config.n_layer, *shape), empty.dtype)
        return KV(empty, empty)
    return [KV(empty, empty) for _ in range(config.n_layer)]


def for_each_query(x: jax.Array, q: jax.Array) -> jax.Array:
    """Keys or values (B, T, G, K) as often as queries (B, T, H, K), which kernels need."""
    served = q.shape[2] // x.shape[2]
    return jnp.repeat(x, served, axis=2) if served > 1 else x


class Attention(nnx.Module):
    """Causal self-attention: three projections, which may be one matrix, and one back from heads.

    The columns of the fused kernel (D, 3 D) are ordered by head: K of its query, K of its key, K of
    its value, then the next head, as in Megatron-LM. So each shard of the columns has whole heads,
    and no device needs the columns of another. To the optimizer the kernel is one matrix of 3 D
    outputs; its norms of rows and columns do not depend on the order of the outputs.

    With `measures`, which training with QK-clip sets, calls without a cache return in its place the
    largest logit of each head, (H,).
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, given = config.d_model, (config, layout, rngs, config.family == "gpt")
        self.config, self.layout, self.fused = config, layout, is_fused(config)
        self.measures = False
        if self.fused:
            self.qkv = Linear(d, 3 * d, ("embed", "heads"), *given)
        else:
            self.query = Linear(d, d, ("embed", "heads"), *given)
            grouped = kv_heads(config) * head_size(config)
            self.key = Linear(d, grouped, ("embed", "heads"), *given)
            self.value = Linear(d, grouped, ("embed", "heads"), *given)
        self.out = Linear(d, d, ("heads", "embed"), *given, output_std(config))

    def __call__(
        self,
        x: jax.Array,
        kv_cache: Any,
        start: jax.Array | int,
        angles: jax.Array | None = None,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Lets each position attend to itself and to earlier ones; rotates by `angles` if given.

        With the number of each token's document, (B, T), to those of its document.
        """
        q, k, v = self.heads(x)  # [B, T, H, K]
        if angles is not None:
            q, k = (rotate_heads(x, angles, self.layout) for x in (q, k))
        mixed, kept = attend(q, k, v, kv_cache, start, self.config, self.layout, documents)
        if self.measures and kv_cache is None:
            axes = ("batch", None, "heads", None)
            masked = () if documents is None else (documents,)
            fixed = (*jax.lax.stop_gradient((q, for_each_query(k, q))), *masked)
            kept = self.layout.divide(largest_logits, axes, *fixed).max(axis=(0, 1, 3))
        return self.out(mixed.reshape(x.shape)), kept  # [B, T, D]

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, H, K), and keys and values (B, T, G, K), of `x` (B, T, D)."""
        shape = (*x.shape[:2], self.config.n_head, head_size(self.config))
        if not self.fused:
            q, k, v = self.query(x), self.key(x), self.value(x)
            grouped = (*shape[:2], kv_heads(self.config), shape[3])
            return q.reshape(shape), k.reshape(grouped), v.reshape(grouped)
        fused = self.qkv(x).reshape(*shape[:3], 3, shape[3])  # [B, T, H, 3, K]
        return fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
