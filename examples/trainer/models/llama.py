"""LLaMA (Touvron et al., arXiv 2302.13971, section 2.2); the recipes have the paper's sizes.

Positions rotate the pairs (i, i + K / 2) of a head, as in Hugging Face's, by angles that grow with
the position (RoPE: Su et al., arXiv 2104.09864, section 3.2). Norms are RMSNorms, the MLP has a
gate (SwiGLU), and there are no biases.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models import blocks, sharding
from examples.trainer.settings.run import ModelConfig, head_size, hidden_width

ROPE_BASE = 10_000.0  # the slowest pair makes a full turn in about 2 pi times as many tokens


def rotation_angles(positions: jax.Array, k: int) -> jax.Array:
    """The angle by which each pair of a head is rotated at each position, (T, K / 2)."""
    speeds = ROPE_BASE ** (-jnp.arange(0, k, 2) / k)  # radians per token, from 1 down
    return positions[:, None] * speeds[None]


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates each head of (B, T, H, K): a product of two depends on their distance only."""
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotated queries and keys."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, d = config, config.d_model
        linear = blocks.linear(config, rngs, use_bias=False)
        self.query, self.key, self.value = linear(d, d), linear(d, d), linear(d, d)
        self.out = linear(d, d)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.config.n_head, head_size(self.config))
        q, k, v = (layer(x).reshape(shape) for layer in (self.query, self.key, self.value))
        return self.out(blocks.attend(rotate(q, angles), rotate(k, angles), v, self.config))


class MLP(nnx.Module):
    """Widens, multiplies by a gate, and narrows again."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f = config.d_model, hidden_width(config)
        linear = blocks.linear(config, rngs, use_bias=False)
        self.gate, self.up, self.down = linear(d, f), linear(d, f), linear(f, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.silu(self.gate(x)) * self.up(x)
        return self.down(sharding.place(y, sharding.BATCH, None, "tensor"))


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm_1 = blocks.norm(nnx.RMSNorm, config, rngs)
        self.attn = Attention(config, rngs)
        self.norm_2 = blocks.norm(nnx.RMSNorm, config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm_1(x), angles)
        return x + self.mlp(self.norm_2(x))


class LLaMA(blocks.LanguageModel):
    """The whole network."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        self.config = config
        self.wte = blocks.embedding(vocab_size, config, rngs)
        self.blocks = blocks.stack(lambda rngs: Block(config, rngs), config, rngs)
        self.norm_f = blocks.norm(nnx.RMSNorm, config, rngs)
        linear = blocks.linear(config, rngs, use_bias=False)
        self.lm_head = None if config.tied else linear(config.d_model, vocab_size)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens).astype(self.config.compute_dtype)
        angles = rotation_angles(jnp.arange(tokens.shape[1]), head_size(self.config))
        x = blocks.run(self.blocks, self.config, x, angles)
        return self.norm_f(x).astype(x.dtype)
