"""What GPT and LLaMA have in common: from hidden states to logits."""

from typing import Any

import jax
from flax import nnx

from examples.trainer.models.layers import HEAD, Embed, Linear, logits
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig


class LanguageModel(nnx.Module):
    """A model whose parts before the head are `hidden`."""

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
