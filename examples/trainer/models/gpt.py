"""GPT: learned positions, pre-norm blocks, GELU, a head tied to the token embedding.

Glossary of shapes: B rows, T tokens in a row, D model width, H heads, K = D / H, F width inside an
MLP, V vocabulary. Every weight is a 2-D (in, out) kernel, so that the default rules of
`optax_muonplus` apply.

By default it is the GPT of the Muon+ paper as its code has it (K1seki221/MuonPlus @8a9ace1): a
fused projection to queries, keys and values, LayerNorm in the blocks and an RMSNorm before the
head, and output projections that begin smaller in deeper models.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models import documents
from examples.trainer.models.attention import Attention
from examples.trainer.models.language_model import LanguageModel, make_blocks, make_head, run_blocks
from examples.trainer.models.layers import Embed, norm
from examples.trainer.models.layout import Layout
from examples.trainer.models.mlp import MLP
from examples.trainer.settings.model import ModelConfig

FINAL_EPSILON = 1e-6  # under the root of the RMSNorm before the head, as in the paper's code


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.ln_1 = norm(nnx.LayerNorm, config, rngs)
        self.attn = Attention(config, layout, rngs)
        self.ln_2 = norm(nnx.LayerNorm, config, rngs)
        self.mlp = MLP(config, layout, rngs)

    def __call__(
        self,
        x: jax.Array,
        kv_cache: Any,
        start: jax.Array | int,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        attended, kv_cache = self.attn(self.ln_1(x), kv_cache, start, documents=documents)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), kv_cache  # [B, T, D]


class GPT(LanguageModel):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, layout: Layout, rngs: nnx.Rngs):
        self.config, self.layout = config, layout
        self.wte = Embed(vocab_size, config, layout, rngs)
        self.wpe = Embed(config.context, config, layout, rngs)
        self.blocks = make_blocks(Block, config, layout, rngs)
        if config.final_norm == "layer":
            self.ln_f = norm(nnx.LayerNorm, config, rngs)
        else:
            self.ln_f = norm(nnx.RMSNorm, config, rngs, FINAL_EPSILON)
        self.lm_head = make_head(config, vocab_size, layout, rngs)

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        first = self.config.document_token
        positions = start + jnp.arange(tokens.shape[1])[None]
        if first is not None:
            positions = start + documents.positions(tokens, first)
        x = self.wte(tokens) + self.wpe(positions)  # [B, T, D]
        numbers = self.document_numbers(tokens)
        x, kv_cache = run_blocks(self.blocks, self.config, x, kv_cache, start, numbers)
        return self.ln_f(x), kv_cache
