"""The networks: GPT and LLaMA, their blocks, and the head from hidden states to logits.

Blocks are a list, or one block whose parameters have a leading layer axis. With a list, each block
is compiled by itself, and its parameters are `blocks/0/...`, `blocks/1/...`. Stacked, the
parameters are `blocks/...` with arrays (layer, ...), and one block is compiled for all layers.

Glossary of shapes: B rows, T tokens in a row, D model width, H heads, K = D / H, F width inside an
MLP, V vocabulary. Every weight is a 2-D (in, out) kernel, so that the default rules of
`optax_muonplus` apply.

GPT is by default that of the Muon+ paper as its code has it (K1seki221/MuonPlus @8a9ace1): learned
positions, a fused projection to queries, keys and values, LayerNorm in the blocks and an RMSNorm
before the head, and output projections that begin smaller in deeper models. LLaMA: Touvron et al.
(arXiv 2302.13971), section 2.2; `settings/presets.py` has the sizes.

Documents may follow each other in a row of tokens and be kept apart in it. The token that stands
between documents begins one: texts are encoded with it in front, and so are prompts. Tokens before
the first one in a row are the rest of an earlier document.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.attention import Attention, rotation_angles
from examples.trainer.models.attention_kernels import is_of_attention
from examples.trainer.models.layers import HEAD, Embed, Layout, Linear, logits, norm, output_std
from examples.trainer.settings.model import ModelConfig, head_size, hidden_width, is_gated


def document_numbers(tokens: jax.Array, first: int) -> jax.Array:
    """The number of the document of each token (B, T), counted from the start of its row."""
    return jnp.cumsum(tokens == first, axis=1)


def document_positions(tokens: jax.Array, first: int) -> jax.Array:
    """The position of each token (B, T) in its document, or in its row if that begins before."""
    place = jnp.arange(tokens.shape[1])[None]
    return place - jax.lax.cummax(jnp.where(tokens == first, place, 0), axis=1)


class MLP(nnx.Module):
    """Widens, applies GELU or, for SwiGLU, multiplies by a gate, and narrows again."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, f, bias = config.d_model, hidden_width(config), config.family == "gpt"
        wider = d, f, ("embed", "mlp"), config, layout, rngs, bias
        self.is_gated = is_gated(config)
        if self.is_gated:
            self.gate = Linear(*wider)
        self.up = Linear(*wider)
        std = output_std(config)
        self.down = Linear(f, d, ("mlp", "embed"), config, layout, rngs, bias, std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x, [B, T, D]."""
        if self.is_gated:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return self.down(jax.nn.gelu(self.up(x)))


def make_blocks(
    block: Callable[[ModelConfig, Layout, nnx.Rngs], Any],
    config: ModelConfig,
    layout: Layout,
    rngs: nnx.Rngs,
) -> Any:
    """All blocks of a model; stacked blocks too have different random keys."""
    if not config.scan:
        return nnx.List([block(config, layout, rngs) for _ in range(config.n_layer)])
    build = nnx.vmap(lambda rngs: block(config, layout, rngs))
    return nnx.split_rngs(splits=config.n_layer)(build)(rngs)


def run_blocks(
    blocks: Any, config: ModelConfig, x: jax.Array, kv_cache: Any, *shared: jax.Array | int | None
) -> tuple[jax.Array, Any]:
    """`x` after all blocks, and what their attention returns: the KV cache with the new tokens.

    Each block gets its part of `kv_cache`, or None if there is none, and `shared`, which is the
    same for all layers.
    """

    def apply(
        block: Any, x: jax.Array, cache: Any, *shared: jax.Array | int | None
    ) -> tuple[jax.Array, Any]:
        return block(x, cache, *shared)

    step = apply
    if config.remat != "none" and kv_cache is None:  # no gradient is taken with a cache
        step = nnx.remat(apply, policy=is_of_attention if config.remat == "attention" else None)
    if config.scan:
        return nnx.scan(
            lambda x, block, cache: step(block, x, cache, *shared),
            in_axes=(nnx.Carry, 0, 0),
            out_axes=(nnx.Carry, 0),
        )(x, blocks, kv_cache)
    updated = []
    for block, cache in zip(blocks, kv_cache or [None] * len(blocks), strict=True):
        x, cache = step(block, x, cache, *shared)
        updated.append(cache)
    return x, updated


class LanguageModel(nnx.Module):
    """A model whose parts before the head are `hidden`."""

    config: ModelConfig
    layout: Layout
    wte: Embed
    lm_head: Linear | None
    tokens: int
    """Of the tokenizer; the embedding and the head may have more."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each position."""
        return self.forward(tokens, None, 0)[0]

    def forward(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """The same for tokens from position `start` on; also the KV cache with them added."""
        x, kv_cache = self.hidden(tokens, kv_cache, start)
        found = logits(x, self.head(), self.layout)
        return found[..., : self.tokens], kv_cache  # [B, T, V]

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """What the head turns into logits, [B, T, D], and the KV cache."""
        raise NotImplementedError

    def document_numbers(self, tokens: jax.Array) -> jax.Array | None:
        """The number of each token's document, (B, T); None if documents are not kept apart."""
        first = self.config.document_token
        return None if first is None else document_numbers(tokens, first)

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [D, V]."""
        return self.wte.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]


def make_head(
    config: ModelConfig, vocab_size: int, layout: Layout, rngs: nnx.Rngs
) -> Linear | None:
    """A head of its own; None if it is tied to the token embedding."""
    if config.tied:
        return None
    return Linear(config.d_model, vocab_size, HEAD, config, layout, rngs, use_bias=False)


FINAL_EPSILON = 1e-6  # under the root of the RMSNorm before the head, as in the paper's code


class GPTBlock(nnx.Module):
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
        self.blocks = make_blocks(GPTBlock, config, layout, rngs)
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
            positions = start + document_positions(tokens, first)
        x = self.wte(tokens) + self.wpe(positions)  # [B, T, D]
        numbers = self.document_numbers(tokens)
        x, kv_cache = run_blocks(self.blocks, self.config, x, kv_cache, start, numbers)
        return self.ln_f(x), kv_cache


class LLaMABlock(nnx.Module):
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
        self.blocks = make_blocks(LLaMABlock, config, layout, rngs)
        self.norm_f = norm(nnx.RMSNorm, config, rngs)
        self.lm_head = make_head(config, vocab_size, layout, rngs)

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        x = self.wte(tokens)  # [B, T, D]
        # Also where documents begin anew: only differences of rotary positions matter.
        positions = start + jnp.arange(tokens.shape[1])
        rotations = rotation_angles(positions, head_size(self.config), self.config.rope_base)
        numbers = self.document_numbers(tokens)
        x, kv_cache = run_blocks(self.blocks, self.config, x, kv_cache, start, rotations, numbers)
        return self.norm_f(x), kv_cache
