"""Transformers, one file each, with the KV cache and sampling that they share."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.typing import ArrayLike

from examples.trainer.models import adapters
from examples.trainer.models.language_model import LanguageModel
from examples.trainer.models.layers import ONE_DEVICE, Layout
from examples.trainer.settings.model import ModelConfig

Forward = Callable[[optax.Params, ArrayLike, Any, jax.Array | int], tuple[jax.Array, Any]]
"""A model as a function: parameters, tokens (B, T), the KV cache of `attention.py` or
None, and the position of the first token, to logits (B, T, V) and the cache with these tokens.
V are the tokens of the tokenizer, also where the network has more words."""


def build(
    config: ModelConfig, vocab_size: int, rngs: nnx.Rngs, layout: Layout = ONE_DEVICE
) -> LanguageModel:
    model = LanguageModel(config, vocab_size, layout, rngs)
    if config.lora.rank:
        adapters.add(model, config, rngs)
    return model
