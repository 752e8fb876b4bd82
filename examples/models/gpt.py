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
from examples.models.language_model import LanguageModel, make_head
from examples.models.layers import Embed, Linear
from examples.models.layout import Layout
from examples.settings.model import ModelConfig, hidden_width


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d = config.d_model
        self.config, self.layout = config, layout
        self.query = Linear(d, d, ("embed", "heads"), config, layout, rngs)
        self.key = Linear(d, d, ("embed", "heads"), config, layout, rngs)
        self.value = Linear(d, d, ("embed", "heads"), config, layout, rngs)
        self.out = Linear(d, d, ("heads", "embed"), config, layout, rngs)

    def __call__(
        self, x: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Lets each position attend to itself and to earlier positions."""
        b, t, d = x.shape
        heads = (b, t, self.config.n_head, d // self.config.n_head)
        q = self.query(x).reshape(heads)  # [B, T, H, K]
        k = self.key(x).reshape(heads)
        v = self.value(x).reshape(heads)
        mixed, kv_cache = attend(q, k, v, kv_cache, start, self.config, self.layout)
        return self.out(mixed.reshape(b, t, d)), kv_cache  # [B, T, D]


class MLP(nnx.Module):
    """Two layers, wider in between."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, f = config.d_model, hidden_width(config)
        self.up = Linear(d, f, ("embed", "mlp"), config, layout, rngs)
        self.down = Linear(f, d, ("mlp", "embed"), config, layout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the same function to each position."""
        return self.down(jax.nn.gelu(self.up(x)))  # [B, T, D]


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm: (x - mean) / sqrt(variance + eps) * scale + bias, in float32 inside."""
    dtype, param_dtype = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
    return nnx.LayerNorm(config.d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.ln_1 = norm(config, rngs)
        self.attn = Attention(config, layout, rngs)
        self.ln_2 = norm(config, rngs)
        self.mlp = MLP(config, layout, rngs)

    def __call__(
        self, x: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """Applies one layer."""
        attended, kv_cache = self.attn(self.ln_1(x), kv_cache, start)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), kv_cache  # [B, T, D]


class GPT(LanguageModel):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, layout: Layout, rngs: nnx.Rngs):
        self.config, self.layout = config, layout
        self.wte = Embed(vocab_size, config, layout, rngs)
        self.wpe = Embed(config.context, config, layout, rngs)
        self.blocks = stack.make(Block, config, layout, rngs)
        self.ln_f = norm(config, rngs)
        self.lm_head = make_head(config, vocab_size, layout, rngs)

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """What the head turns into logits, [B, T, D], and the KV cache."""
        positions = start + jnp.arange(tokens.shape[1])
        x = self.wte(tokens) + self.wpe(positions[None])  # [B, T, D]
        x, kv_cache = stack.run(self.blocks, self.config, x, kv_cache, start)
        return self.ln_f(x), kv_cache
