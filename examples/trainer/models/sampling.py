"""Sampling tokens from a model.

Keys and values of earlier tokens are cached, so that each new token costs a pass over one token.
When the model's context is full, the last half of it is read again and sampling continues.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from examples.trainer.models.attention import empty_kv_cache
from examples.trainer.models.language_model import Forward
from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.validation import Count, NotNegative


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: NotNegative = 0.8
    """Below 1 sharpens the model's distribution; 0 always takes the likeliest token."""
    top_k: Count = 50
    """Number of likeliest tokens to draw from."""


DEFAULT = Sampling()


def sample_ids(
    forward: Forward,
    params: optax.Params,
    ids: Sequence[int],
    n_new: int,
    model: ModelConfig,
    key: jax.Array,
    sampling: Sampling = DEFAULT,
) -> list[int]:
    """`n_new` ids that follow `ids`; compiles two programs, whatever the lengths."""
    validation.check(sampling)
    read_window, read_token = make_steps(forward, model, key.sharding, sampling)
    text, kv_cache, filled = list(ids), None, 0
    for i in range(n_new):
        step_key = jax.random.fold_in(key, i)
        if kv_cache is None or filled == model.context:
            # The first window takes as much of the prompt as fits. Later windows begin with half
            # of the context, so that the next one is due only after as many tokens.
            size = model.context if kv_cache is None else max(1, model.context // 2)
            kept = text[max(0, len(text) - size) :]
            window = np.zeros((1, model.context), np.int32)
            window[0, : len(kept)] = kept
            token, kv_cache = read_window(params, window, len(kept), step_key)
            filled = len(kept)
        else:
            last = np.full((1, 1), text[-1], np.int32)
            token, kv_cache = read_token(params, last, kv_cache, filled, step_key)
            filled += 1
        text.append(int(token))
    return text[len(ids) :]


@functools.lru_cache(maxsize=2)  # several texts are often sampled from one model
def make_steps(
    forward: Forward, model: ModelConfig, replicated: Any, sampling: Sampling
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions to the next token and the KV cache: from a window, from one token.

    The token has the sharding `replicated`, so that each process can read it.
    """

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        best, tokens = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))
        if sampling.temperature == 0:
            return tokens[0]
        return tokens[jax.random.categorical(key, best / sampling.temperature)]

    @functools.partial(jax.jit, out_shardings=(replicated, None))
    def read_window(
        params: optax.Params, window: ArrayLike, length: ArrayLike, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        # No earlier token sees the padding after `length`, and later tokens overwrite it.
        logits, kv_cache = forward(params, window, empty_kv_cache(model, rows=1), 0)
        return draw(logits[0, jnp.asarray(length) - 1], key), kv_cache

    @functools.partial(jax.jit, out_shardings=(replicated, None), donate_argnums=2)
    def read_token(
        params: optax.Params,
        token: ArrayLike,
        kv_cache: Any,
        filled: jax.Array | int,
        key: jax.Array,
    ) -> tuple[jax.Array, Any]:
        logits, kv_cache = forward(params, token, kv_cache, filled)
        return draw(logits[0, 0], key), kv_cache

    return read_window, read_token
