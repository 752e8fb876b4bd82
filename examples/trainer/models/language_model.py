"""What GPT and LLaMA have in common: their blocks, and the head from hidden states to logits.

Blocks are a list, or one block whose parameters have a leading layer axis. With a list, each block
is compiled by itself, and its parameters are `blocks/0/...`, `blocks/1/...`. Stacked, the
parameters are `blocks/...` with arrays (layer, ...), and one block is compiled for all layers.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from examples.trainer.models import documents
from examples.trainer.models.attention_kernels import is_of_attention
from examples.trainer.models.layers import HEAD, Embed, Linear, logits
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig


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
        raise NotImplementedError

    def document_numbers(self, tokens: jax.Array) -> jax.Array | None:
        """The number of each token's document, (B, T); None if documents are not kept apart."""
        first = self.config.document_token
        return None if first is None else documents.numbers(tokens, first)

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
