"""GPT: learned positions, pre-norm blocks, GELU, a head tied to the token embedding.

Glossary of shapes: B rows, T tokens in a row, D model width, H heads, K = D / H, F width inside an
MLP, V vocabulary. Every weight is a 2-D (in, out) kernel, so that the default rules of
`optax_muonplus` apply.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.models import stack
from examples.models.attention import attend
from examples.settings.model import ModelConfig, hidden_width

INIT = nnx.initializers.normal(0.02)  # as in GPT-2 and the paper's GPT


def linear(d_in: int, d_out: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer with a float32 kernel that multiplies in `dtype`."""
    return nnx.Linear(
        d_in, d_out, kernel_init=INIT, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
    )


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, dtype = config.d_model, jnp.dtype(config.compute_dtype)
        self.n_head = config.n_head
        self.query = linear(d, d, dtype, rngs)
        self.key = linear(d, d, dtype, rngs)
        self.value = linear(d, d, dtype, rngs)
        self.out = linear(d, d, dtype, rngs)

    def __call__(
        self, x: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Lets each position attend to itself and to earlier positions."""
        b, t, d = x.shape
        heads = (b, t, self.n_head, d // self.n_head)
        q = self.query(x).reshape(heads)  # [B, T, H, K]
        k = self.key(x).reshape(heads)
        v = self.value(x).reshape(heads)
        mixed, kv_cache = attend(q, k, v, kv_cache, start)  # [B, T, H, K]
        return self.out(mixed.reshape(b, t, d)), kv_cache  # [B, T, D]


class MLP(nnx.Module):
    """Two layers, wider in between."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f, dtype = config.d_model, hidden_width(config), jnp.dtype(config.compute_dtype)
        self.up = linear(d, f, dtype, rngs)
        self.down = linear(f, d, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the same function to each position."""
        return self.down(jax.nn.gelu(self.up(x)))  # [B, T, D]


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        self.ln_1 = nnx.LayerNorm(config.d_model, dtype=dtype, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.ln_2 = nnx.LayerNorm(config.d_model, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Applies one layer."""
        attended, kv_cache = self.attn(self.ln_1(x), kv_cache, start)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), kv_cache  # [B, T, D]


class GPT(nnx.Module):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        d, dtype = config.d_model, jnp.dtype(config.compute_dtype)
        self.config = config
        self.wte = nnx.Embed(vocab_size, d, embedding_init=INIT, dtype=dtype, rngs=rngs)
        self.wpe = nnx.Embed(config.context, d, embedding_init=INIT, dtype=dtype, rngs=rngs)
        self.blocks = stack.make(Block, config, rngs)
        self.ln_f = nnx.LayerNorm(d, dtype=dtype, rngs=rngs)
        self.lm_head = (
            None
            if config.tied
            else nnx.Linear(d, vocab_size, use_bias=False, kernel_init=INIT, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each position."""
        return self.forward(tokens, None, 0)[0]

    def forward(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """The same for tokens from position `start` on; also the KV cache with them added."""
        positions = start + jnp.arange(tokens.shape[1])
        x = self.wte(tokens) + self.wpe(positions)[None]  # [B, T, D]
        x, kv_cache = stack.run(self.blocks, self.config, x, kv_cache, start)
        x = self.ln_f(x)
        logits = self.wte.attend(x) if self.lm_head is None else self.lm_head(x)
        return logits.astype(jnp.float32), kv_cache  # [B, T, V]
