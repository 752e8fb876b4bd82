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
(arXiv 2302.13971), section 2.2; the recipes have the sizes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.trainer.models.attention import Attention, rotation_angles
from examples.trainer.models.layers import (
    HEAD,
    NORM_EPSILON,
    ONE_DEVICE,
    Embed,
    Layout,
    Linear,
    logits,
    norm,
    output_std,
)
from examples.trainer.settings.model import ModelConfig, head_size, hidden_width


class MLP(nnx.Module):
    """Widens, applies GELU or, for LLaMA, SwiGLU, which multiplies by a gate, and narrows again."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, f, bias = config.d_model, hidden_width(config), config.family == "gpt"
        wider = d, f, ("embed", "mlp"), config, layout, rngs, bias
        self.is_gated = config.family == "llama"
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

    def __call__(self, x: jax.Array, angles: jax.Array | None) -> jax.Array:
        first, second = (getattr(self, f"{self.norm}_{i}") for i in (1, 2))
        x = x + self.attn(first(x), angles)
        return x + self.mlp(second(x))  # [B, T, D]


def make_blocks(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Any:
    """All blocks of a model; stacked blocks too have different random keys."""
    if not config.scan:
        return nnx.List([Block(config, layout, rngs) for _ in range(config.n_layer)])
    build = nnx.vmap(lambda rngs: Block(config, layout, rngs))
    return nnx.split_rngs(splits=config.n_layer)(build)(rngs)


def run_blocks(
    blocks: Any, config: ModelConfig, x: jax.Array, angles: jax.Array | None
) -> jax.Array:
    """`x` after all blocks."""

    def apply(block: Any, x: jax.Array, angles: jax.Array | None) -> jax.Array:
        return block(x, angles)

    step = nnx.remat(apply) if config.remat == "full" else apply
    if config.scan:
        return nnx.scan(
            lambda x, block: step(block, x, angles), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(x, blocks)
    for block in blocks:
        x = step(block, x, angles)
    return x


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
        epsilon = NORM_EPSILON
        if config.family == "gpt" and config.final_norm == "rms":
            kind, epsilon = nnx.RMSNorm, FINAL_EPSILON
        setattr(self, f"{self.norm}_f", norm(kind, config, rngs, epsilon))
        if config.tied:
            self.lm_head = None
        else:
            width = config.d_model
            self.lm_head = Linear(width, vocab_size, HEAD, config, layout, rngs, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each position, [B, T, V]."""
        return logits(self.hidden(tokens), self.head(), self.layout)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the head turns into logits, [B, T, D]."""
        config = self.config
        x, angles = self.wte(tokens), None  # [B, T, D]
        place = jnp.arange(tokens.shape[1])
        if config.family == "gpt":
            x = x + self.wpe(place[None])
        else:
            angles = rotation_angles(place, head_size(config))
        return getattr(self, f"{self.norm}_f")(run_blocks(self.blocks, config, x, angles))

    def head(self) -> jax.Array:
        """The matrix from hidden states to logits, [D, V]."""
        return self.wte.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]


Forward = Callable[[optax.Params, ArrayLike], jax.Array]
"""A model as a function: parameters and tokens (B, T) to logits (B, T, V)."""
