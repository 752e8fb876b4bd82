"""LLaMA: rotary positions, pre-norm blocks with RMSNorm, SwiGLU, no biases, an untied head.

Glossary of shapes: B rows, T tokens in a row, D model width, H heads, K = D / H, F width inside an
MLP, V vocabulary. Every weight is a 2-D (in, out) kernel, so that the default rules of
`optax_muonplus` apply.

Source: Touvron et al., LLaMA (arXiv 2302.13971), section 2.2; `settings/presets.py` has
the sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.attention import Attention
from examples.trainer.models.language_model import LanguageModel, make_blocks, make_head, run_blocks
from examples.trainer.models.layers import Embed, norm
from examples.trainer.models.layout import Layout
from examples.trainer.models.mlp import MLP
from examples.trainer.models.rotary import angles
from examples.trainer.settings.model import ModelConfig, head_size


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.norm_1 = norm(nnx.RMSNorm, config, rngs)
        self.attn = Attention(config, layout, rngs)
        self.norm_2 = norm(nnx.RMSNorm, config, rngs)
        self.mlp = MLP(config, layout, rngs)

    def __call__(
        self,
        x: jax.Array,
        kv_cache: Any,
        start: jax.Array | int,
        angles: jax.Array,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        attended, kv_cache = self.attn(self.norm_1(x), kv_cache, start, angles, documents)
        x = x + attended
        return x + self.mlp(self.norm_2(x)), kv_cache  # [B, T, D]


class LLaMA(LanguageModel):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, layout: Layout, rngs: nnx.Rngs):
        self.config, self.layout = config, layout
        self.wte = Embed(vocab_size, config, layout, rngs)
        self.blocks = make_blocks(Block, config, layout, rngs)
        self.norm_f = norm(nnx.RMSNorm, config, rngs)
        self.lm_head = make_head(config, vocab_size, layout, rngs)

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        x = self.wte(tokens)  # [B, T, D]
        # Also where documents begin anew: only differences of rotary positions matter.
        positions = start + jnp.arange(tokens.shape[1])
        rotations = angles(positions, head_size(self.config), self.config.rope_base)
        numbers = self.document_numbers(tokens)
        x, kv_cache = run_blocks(self.blocks, self.config, x, kv_cache, start, rotations, numbers)
        return self.norm_f(x), kv_cache
