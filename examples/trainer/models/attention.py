"""Causal attention, with or without a KV cache of earlier tokens, and its rotary positions.

In rotary positions each pair of numbers of a head, (i, i + K / 2) as in Hugging Face's LLaMA, turns
by an angle that grows with the position: Su et al., RoFormer (arXiv 2104.09864), section 3.2.

Glossary of shapes: B rows, T new tokens, S positions in the cache, D model width, H heads, G heads
of keys and values, K width of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.attention_kernels import KERNELS, choose, largest_logits
from examples.trainer.models.layers import RULES, Layout, Linear, output_std, shard_count
from examples.trainer.settings.model import ModelConfig, head_size, is_fused, kv_heads

LANES = 128  # numbers in a row of a TPU's vector registers, and of its matrix unit


def rotation_angles(positions: jax.Array, k: int, base: float) -> jax.Array:
    """The angle by which each pair of a head is rotated at each position, (T, K / 2)."""
    speeds = base ** (-jnp.arange(0, k, 2) / k)  # radians per token, from 1 down
    return positions[:, None] * speeds[None]


def rotate_heads(x: jax.Array, angles: jax.Array, layout: Layout) -> jax.Array:
    """:func:`rotate`, or on a TPU the same by :func:`rotate_by_product`."""
    if layout.platform != "tpu":
        return rotate(x, angles)
    h, k = x.shape[2:]
    shards = shard_count(layout.mesh, RULES["heads"]) if layout.mesh else 1
    group = max(1, LANES // k)
    return rotate_by_product(x, angles, 1 if h % (group * shards) else group)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K / 2) of each head of `x` (B, T, H, K) by (T, K / 2) `angles`.

    The product of a query and a key then depends only on the difference of their positions.
    """
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotate_by_product(x: jax.Array, angles: jax.Array, group: int) -> jax.Array:
    """The same numbers: (a, b) cos + (b, a) (-sin, sin), with a product that exchanges halves.

    A TPU has to move numbers between lanes to cut heads in halves. Its matrix unit exchanges them
    on the way, and the product is exact, as each sum has one term. `group` heads are taken
    together, so that they fill the lanes.
    """
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    tables = (jnp.concatenate(halves, axis=-1) for halves in ((cos, cos), (-sin, sin)))
    cos, sin = (jnp.tile(table, (1, group))[None, :, None] for table in tables)
    k = x.shape[-1]
    exchange = jnp.kron(jnp.eye(group), jnp.roll(jnp.eye(k), k // 2, axis=0)).astype(x.dtype)
    return turn(x.reshape(*x.shape[:2], -1, group * k), cos, sin, exchange).reshape(x.shape)


@jax.custom_vjp
def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, exchange: jax.Array) -> jax.Array:
    """Computes x cos + (x exchange) sin in float32; only `x` has a gradient."""
    exchanged = jnp.matmul(x, exchange, precision="highest", preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + exchanged * sin).astype(x.dtype)


def turn_forward(x: jax.Array, *tables: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return turn(x, *tables), tables


def turn_backward(
    tables: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, None, None, None]:
    """Turns the gradient back, which rounds it once; JAX's own transpose would round it twice."""
    cos, sin, exchange = tables
    return turn(g, cos, -sin, exchange), None, None, None


turn.defvjp(turn_forward, turn_backward)


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
