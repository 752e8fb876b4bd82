"""Sampling tokens from a model: each new token is drawn after a pass over the last ones."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.validation import Count, NotNegative
from examples.trainer.training.step import Forward


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
    """`n_new` ids that follow `ids`; compiles one program, whatever the lengths."""
    validation.check(sampling)
    draw, text = make_draw(forward, key.sharding, sampling), list(ids)
    for i in range(n_new):
        seen = text[-model.context :]
        window = np.zeros((1, model.context), np.int32)
        window[0, : len(seen)] = seen
        text.append(int(draw(params, window, len(seen), jax.random.fold_in(key, i))))
    return text[len(ids) :]


@functools.lru_cache(maxsize=2)  # several texts are often sampled from one model
def make_draw(forward: Forward, replicated: Any, sampling: Sampling) -> Callable[..., jax.Array]:
    """A compiled function to the token after the first `length` ones of a window (1, T).

    The token has the sharding `replicated`, so that each process can read it.
    """

    @functools.partial(jax.jit, out_shardings=replicated)
    def draw(
        params: optax.Params, window: ArrayLike, length: ArrayLike, key: jax.Array
    ) -> jax.Array:
        # No earlier token sees the padding after `length`.
        logits = forward(params, window)[0, jnp.asarray(length) - 1]
        best, tokens = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))
        if sampling.temperature == 0:
            return tokens[0]
        return tokens[jax.random.categorical(key, best / sampling.temperature)]

    return draw
