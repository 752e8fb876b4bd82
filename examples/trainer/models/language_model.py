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
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.trainer.models.attention import Attention, is_of_attention, rotation_angles
from examples.trainer.models.layers import (
    HEAD,
    ONE_DEVICE,
    Embed,
    Layout,
    Linear,
    logits,
    norm,
    output_std,
)
from examples.trainer.settings.model import (
    ModelConfig,
    head_size,
    hidden_width,
    is_gated,
)


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


FINAL_EPSILON = 1e-6  # under the root of GPT's RMSNorm before the head, as in the paper's code
NORMS = {"gpt": ("ln", nnx.LayerNorm), "llama": ("norm", nnx.RMSNorm)}
"""Family to the name of its norms in the tree of parameters, and their kind in blocks."""


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.norm, kind = NORMS[config.family]
        setattr(self, f"{self.norm}_1", norm(kind, config, rngs))
        self.attn = Attention(config, layout, rngs)
        setattr(self, f"{self.norm}_2", norm(kind, config, rngs))
        self.mlp = MLP(config, layout, rngs)

    def __call__(
        self,
        x: jax.Array,
        kv_cache: Any,
        start: jax.Array | int,
        angles: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        first, second = (getattr(self, f"{self.norm}_{i}") for i in (1, 2))
        attended, kv_cache = self.attn(first(x), kv_cache, start, angles)
        x = x + attended
        return x + self.mlp(second(x)), kv_cache  # [B, T, D]


def make_blocks(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Any:
    """All blocks of a model; stacked blocks too have different random keys."""
    if not config.scan:
        return nnx.List([Block(config, layout, rngs) for _ in range(config.n_layer)])
    build = nnx.vmap(lambda rngs: Block(config, layout, rngs))
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
    """Token ids to next-token logits: a GPT or a LLaMA."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        rngs: nnx.Rngs,
        layout: Layout = ONE_DEVICE,
    ):
        self.config, self.layout = config, layout
        self.norm, kind = NORMS[config.family]
        self.wte = Embed(vocab_size, config, layout, rngs)
        if config.family == "gpt":
            self.wpe = Embed(config.context, config, layout, rngs)
        self.blocks = make_blocks(config, layout, rngs)
        epsilon = 0.0
        if config.family == "gpt" and config.final_norm == "rms":
            kind, epsilon = nnx.RMSNorm, FINAL_EPSILON
        setattr(self, f"{self.norm}_f", norm(kind, config, rngs, epsilon))
        if config.tied:
            self.lm_head = None
        else:
            width = config.d_model
            self.lm_head = Linear(width, vocab_size, HEAD, config, layout, rngs, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each position."""
        return self.forward(tokens, None, 0)[0]

    def forward(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """The same for tokens from position `start` on; also the KV cache with them added."""
        x, kv_cache = self.hidden(tokens, kv_cache, start)
        return logits(x, self.head(), self.layout), kv_cache  # [B, T, V]

    def hidden(
        self, tokens: jax.Array, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        """What the head turns into logits, [B, T, D], and the KV cache."""
        config = self.config
        x, angles = self.wte(tokens), None  # [B, T, D]
        place = jnp.arange(tokens.shape[1])
        if config.family == "gpt":
            x = x + self.wpe(start + place[None])
        else:
            angles = rotation_angles(start + place, head_size(config), config.rope_base)
        x, kv_cache = run_blocks(self.blocks, config, x, kv_cache, start, angles)
        return getattr(self, f"{self.norm}_f")(x), kv_cache

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [D, V]."""
        return self.wte.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]


Forward = Callable[[optax.Params, ArrayLike, Any, jax.Array | int], tuple[jax.Array, Any]]
"""A model as a function: parameters, tokens (B, T), the KV cache of `attention.py` or
None, and the position of the first token, to logits (B, T, V) and the cache with these tokens."""
