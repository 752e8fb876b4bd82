"""Text from a model: each token is drawn after a pass over the whole window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples.config import RunConfig
from examples.data.tokenizer import end_id
from examples.training import Apply, TrainState

TEMPERATURE = 0.8  # below 1: likelier tokens than the model's own distribution would give
TOP_K = 50  # tokens to draw from, so that the long tail of unlikely ones is never drawn


def sample_text(apply: Apply, state: TrainState, tokenizer: Tokenizer, config: RunConfig) -> str:
    """The prompt and `sample_tokens` tokens after it."""
    ids = [end_id(tokenizer), *tokenizer.encode(config.prompt).ids]
    n_new, context = config.sample_tokens, config.model.context
    new = sample_ids(apply, state.params, ids, n_new, context, state.key)
    return tokenizer.decode(ids[1:] + new, skip_special_tokens=False)


def sample_ids(
    apply: Apply, params: optax.Params, ids: list[int], n_new: int, context: int, key: jax.Array
) -> list[int]:
    """`n_new` ids that follow `ids`; arrays have one shape throughout, so this compiles once."""

    # The token goes where the key is: to every device, so that each process can read it.
    @functools.partial(jax.jit, out_shardings=key.sharding)
    def draw(params: optax.Params, window: ArrayLike, i: int, key: jax.Array) -> jax.Array:
        last = jnp.minimum(len(ids) + i, context) - 1
        logits = apply(params, window)[0, last]  # [V]; what follows `last` is not attended to
        best, tokens = jax.lax.top_k(logits, min(TOP_K, logits.shape[0]))
        return tokens[jax.random.categorical(jax.random.fold_in(key, i), best / TEMPERATURE)]

    text = list(ids)
    for i in range(n_new):
        seen = text[-context:]
        window = np.zeros((1, context), np.int32)
        window[0, : len(seen)] = seen
        text.append(int(draw(params, window, i, key)))
    return text[len(ids) :]
