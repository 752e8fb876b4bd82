"""Causal attention, with or without a KV cache of earlier tokens, and its rotary positions.

In rotary positions each pair of numbers of a head, (i, i + K / 2) as in Hugging Face's LLaMA, turns
by an angle that grows with the position: Su et al., RoFormer (arXiv 2104.09864), section 3.2.

There are three kernels, which compute the same. `plain` holds all scores of a row and head, T x T.
cuDNN's and Pallas' splash attention do not; they are written for NVIDIA GPUs and TPUs.

Glossary of shapes: B rows, T new tokens, S positions in the cache, D model width, H heads, G heads
of keys and values, K width of a head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from examples.trainer.models.layers import Layout, Linear, output_std
from examples.trainer.settings.model import ModelConfig, head_size, is_fused, kv_heads
from examples.trainer.system.errors import UserError

KEPT = "attention"  # what rematerialization may keep, by this name
OWN = {"gpu": "cudnn", "tpu": "splash"}
"""The kernel that is written for a platform."""
TILES = (512, 256, 128)  # positions; 512 is MaxText's default, 128 the lanes of a TPU's registers
HEAD = 64  # widths of heads that splash attention was compiled for here are multiples of this


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return checkpoint_name(jax.nn.dot_product_attention(q, k, v, is_causal=True), KEPT)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash(q: jax.Array, k: jax.Array, v: jax.Array, interpret: bool = False) -> jax.Array:
    """Pallas' splash attention; `interpret` computes it on any device, slowly."""
    # Imported here, since it takes a second and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    t, h, width = q.shape[1:]
    tile = next(n for n in TILES if t % n == 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    attention = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((t, t))] * h),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        residual_checkpoint_name=KEPT,
    )
    rows = (x.swapaxes(1, 2) for x in (q * width**-0.5, k, v))
    return jax.vmap(attention)(*rows).swapaxes(1, 2)


KERNELS = {"plain": plain, "cudnn": cudnn, "splash": splash}


def is_of_attention(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """The policy of rematerialization that keeps what these kernels give, and nothing else."""
    named = primitive.name == "name" and parameters["name"] == KEPT
    return named or primitive.name.startswith("dot_product_attention_fwd")  # cuDNN's


class Choice(NamedTuple):
    """A kernel, and why another one that was wanted cannot run; empty if it can."""

    kernel: str
    reason: str


@functools.cache
def choose(config: ModelConfig, layout: Layout, length: int) -> Choice:
    """The kernel for rows of `length` tokens: the one asked for, or plain if that cannot run."""
    wanted = config.attention
    if wanted == "auto":
        wanted = OWN.get(layout.platform, "plain")
    width, reason = head_size(config), ""
    if wanted in OWN.values() and OWN.get(layout.platform) != wanted:
        reason = f"{wanted} is not for a {layout.platform}"
    elif wanted == "cudnn":
        shape = (1, length, config.n_head, width)
        row = jax.ShapeDtypeStruct(shape, jnp.dtype(config.compute_dtype))
        reason = problem_of_cudnn(row, layout)
    elif wanted == "splash" and (length % TILES[-1] or width % HEAD):
        reason = f"splash needs rows of a multiple of {TILES[-1]} tokens and heads of {HEAD}"
    return Choice("plain", reason) if reason else Choice(wanted, "")


def problem_of_cudnn(row: jax.ShapeDtypeStruct, layout: Layout) -> str:
    """Why cuDNN cannot compute the attention of a row, and its gradient; empty if it can."""

    def total(x: jax.Array) -> jax.Array:
        return cudnn(x, x, x).astype(jnp.float32).sum()

    try:
        gradient = jax.jit(jax.grad(total)).trace(row)
        # Some installations lack a library that cuDNN loads when it compiles (JAX issue 32430).
        # Compile-only devices and other hosts cannot be tried.
        if layout.is_here:
            gradient.lower().compile()
    except (RuntimeError, NotImplementedError, ValueError) as error:  # XLA's are RuntimeErrors
        return f"cudnn: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""


def check_attention(config: ModelConfig, layout: Layout) -> None:
    """Refuses a kernel that was asked for by name and cannot run."""
    choice = choose(config, layout, config.context)
    if choice.reason and config.attention != "auto":
        raise UserError(
            f"--model.attention {config.attention} cannot be used: {choice.reason}. Choose auto or"
            " plain."
        )


def describe(config: ModelConfig, layout: Layout) -> str:
    """The kernel in words, with the reason if it is not the one written for the device."""
    kernel, reason = choose(config, layout, config.context)
    return f"{kernel} attention" + (f" ({reason})" if reason else "")


def rotation_angles(positions: jax.Array, k: int, base: float) -> jax.Array:
    """The angle by which each pair of a head is rotated at each position, (T, K / 2)."""
    speeds = base ** (-jnp.arange(0, k, 2) / k)  # radians per token, from 1 down
    return positions[:, None] * speeds[None]


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K / 2) of each head of `x` (B, T, H, K) by (T, K / 2) `angles`.

    The product of a query and a key then depends only on the difference of their positions.
    """
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


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
) -> tuple[jax.Array, KV | None]:
    """The attention output for each new token, (B, T, H, K), and the cache with the new tokens.

    Without a cache, each token attends to itself and to earlier tokens of its row, by the kernel
    that `config` asks for. With a cache, the new tokens have the positions from `start` on, and
    attend to all positions up to their own.
    """
    t = q.shape[1]
    if kv_cache is None or (isinstance(start, int) and start == 0 and t == kv_cache.keys.shape[1]):
        kernel = KERNELS[choose(config, layout, t).kernel]
        keys, values = (for_each_query(x, q) for x in (k, v))
        mixed = layout.divide(kernel, ("batch", None, "heads", None), q, keys, values)
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
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, given = config.d_model, (config, layout, rngs, config.family == "gpt")
        self.config, self.layout, self.fused = config, layout, is_fused(config)
        if self.fused:
            self.qkv = Linear(d, 3 * d, ("embed", "heads"), *given)
        else:
            self.query = Linear(d, d, ("embed", "heads"), *given)
            grouped = kv_heads(config) * head_size(config)
            self.key = Linear(d, grouped, ("embed", "heads"), *given)
            self.value = Linear(d, grouped, ("embed", "heads"), *given)
        self.out = Linear(d, d, ("heads", "embed"), *given, output_std(config))

    def __call__(
        self, x: jax.Array, kv_cache: Any, start: jax.Array | int, angles: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Lets each position attend to itself and to earlier ones; rotates by `angles` if given."""
        q, k, v = self.heads(x)  # [B, T, H, K]
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        mixed, kv_cache = attend(q, k, v, kv_cache, start, self.config, self.layout)
        return self.out(mixed.reshape(x.shape)), kv_cache  # [B, T, D]

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, H, K), and keys and values (B, T, G, K), of `x` (B, T, D)."""
        shape = (*x.shape[:2], self.config.n_head, head_size(self.config))
        if not self.fused:
            q, k, v = self.query(x), self.key(x), self.value(x)
            grouped = (*shape[:2], kv_heads(self.config), shape[3])
            return q.reshape(shape), k.reshape(grouped), v.reshape(grouped)
        fused = self.qkv(x).reshape(*shape[:3], 3, shape[3])  # [B, T, H, 3, K]
        return fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
