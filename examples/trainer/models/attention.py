"""Causal attention, the kernels that compute it, and its rotary positions.

In rotary positions each pair of numbers of a head, (i, i + K / 2) as in Hugging Face's LLaMA, turns
by an angle that grows with the position: Su et al., RoFormer (arXiv 2104.09864), section 3.2.

There are three kernels, which compute the same. `plain` holds all scores of a row and head, T x T.
cuDNN's and Pallas' splash attention do not; they are written for NVIDIA GPUs and TPUs.

Glossary of shapes: B rows, T tokens, D model width, H heads, K width of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.layers import Layout, Linear, output_std
from examples.trainer.settings.model import ModelConfig, head_size

TILES = (512, 256, 128)  # positions; 512 is MaxText's default, 128 the lanes of a TPU's registers
HEAD = 64  # widths of heads that splash attention was compiled for here are multiples of this
ROPE_BASE = 10_000.0  # the slowest pair makes a full turn in about 2 pi times as many tokens


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


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
    )
    rows = (x.swapaxes(1, 2) for x in (q * width**-0.5, k, v))
    return jax.vmap(attention)(*rows).swapaxes(1, 2)


KERNELS = {"plain": plain, "cudnn": cudnn, "splash": splash}


def choose(config: ModelConfig, layout: Layout, length: int) -> str:
    """The kernel for rows of `length` tokens.

    auto takes the one written for the device where sizes and precision are those that it has. One
    that was asked for by name, or whose libraries lack, fails in JAX's words.
    """
    if config.attention != "auto":
        return config.attention
    width = head_size(config)
    if layout.platform == "gpu" and config.compute_dtype == "bfloat16":
        return "cudnn" if length % 64 == 0 and width % 8 == 0 and width <= 128 else "plain"
    if layout.platform == "tpu" and length % TILES[-1] == 0 and width % HEAD == 0:
        return "splash"
    return "plain"


def rotation_angles(positions: jax.Array, k: int) -> jax.Array:
    """The angle by which each pair of a head is rotated at each position, (T, K / 2)."""
    speeds = ROPE_BASE ** (-jnp.arange(0, k, 2) / k)  # radians per token, from 1 down
    return positions[:, None] * speeds[None]


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K / 2) of each head of `x` (B, T, H, K) by (T, K / 2) `angles`.

    The product of a query and a key then depends only on the difference of their positions.
    """
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention: projections to queries, keys and values, and one back from heads.

    GPT has one matrix for all three. The columns of its kernel (D, 3 D) are ordered by head: K of
    its query, K of its key, K of its value, then the next head, as in Megatron-LM. So each shard of
    the columns has whole heads, and no device needs the columns of another. To the optimizer the
    kernel is one matrix of 3 D outputs; its norms of rows and columns do not depend on the order of
    the outputs. LLaMA has three matrices.
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, given = config.d_model, (config, layout, rngs, config.family == "gpt")
        self.config, self.layout = config, layout
        if config.family == "gpt":
            self.qkv = Linear(d, 3 * d, ("embed", "heads"), *given)
        else:
            self.query = Linear(d, d, ("embed", "heads"), *given)
            self.key = Linear(d, d, ("embed", "heads"), *given)
            self.value = Linear(d, d, ("embed", "heads"), *given)
        self.out = Linear(d, d, ("heads", "embed"), *given, output_std(config))

    def __call__(self, x: jax.Array, angles: jax.Array | None) -> jax.Array:
        """Lets each position attend to itself and to earlier ones; rotates by `angles` if given."""
        q, k, v = self.heads(x)  # [B, T, H, K]
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        kernel = KERNELS[choose(self.config, self.layout, x.shape[1])]
        mixed = self.layout.divide(kernel, ("batch", None, "heads", None), q, k, v)
        return self.out(mixed.reshape(x.shape))  # [B, T, D]

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values (B, T, H, K) of `x` (B, T, D)."""
        shape = (*x.shape[:2], self.config.n_head, head_size(self.config))
        if self.config.family == "llama":
            q, k, v = self.query(x), self.key(x), self.value(x)
            return q.reshape(shape), k.reshape(shape), v.reshape(shape)
        fused = self.qkv(x).reshape(*shape[:3], 3, shape[3])  # [B, T, H, 3, K]
        return fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
