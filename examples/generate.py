"""Text from a trained model: `python -m examples.generate runs/NAME --prompt "def "`.

The keys and values of the tokens so far are kept, so that each new token costs one pass over one
token. The window of a model has an end: when it is full, the last half of it is read again, and the
text goes on from there.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples import trained
from examples.command import run_command
from examples.config import RunConfig
from examples.data.tokenizer import end_id
from examples.errors import UserError
from examples.models.attention import no_tokens
from examples.models.config import ModelConfig
from examples.trained import Place
from examples.training import Extend, TrainState

PROGRAM = "python -m examples.generate"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8
    """Below 1: likelier tokens than the model's own distribution would give; 0: the likeliest."""
    top_k: int = 50
    """Tokens to draw from, so that the long tail of unlikely ones is never drawn."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(generate, args=argv, prog=PROGRAM)))


def generate(
    place: Annotated[Place, tyro.conf.arg(name="")],
    prompt: str = "",
    tokens: int = 200,
    seed: int = 0,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(),
) -> str:
    """Writes on where a text ends.

    Args:
      place: the run.
      prompt: start of the text; empty: the start of a document.
      tokens: how many to add.
      seed: decides what is drawn.
      sampling: how it is drawn.
    """
    if tokens < 1:
        raise UserError(f"--tokens is {tokens}: give at least 1.")
    model = trained.load(place)
    ids = [end_id(model.tokenizer), *model.tokenizer.encode(prompt).ids]
    new = sample_ids(
        model.extend, model.params, ids, tokens, model.config.model, jax.random.key(seed), sampling
    )
    return model.tokenizer.decode(ids[1:] + new, skip_special_tokens=False)


def sample_text(extend: Extend, state: TrainState, tokenizer: Tokenizer, config: RunConfig) -> str:
    """The prompt of a run and `sample_tokens` tokens after it."""
    ids = [end_id(tokenizer), *tokenizer.encode(config.prompt).ids]
    new = sample_ids(extend, state.params, ids, config.sample_tokens, config.model, state.key)
    return tokenizer.decode(ids[1:] + new, skip_special_tokens=False)


def sample_ids(
    extend: Extend,
    params: optax.Params,
    ids: Sequence[int],
    n_new: int,
    model: ModelConfig,
    key: jax.Array,
    sampling: Sampling = Sampling(),
) -> list[int]:
    """`n_new` ids that follow `ids`; compiles two programs, whatever the lengths."""
    check(sampling)
    reread, go_on = make_steps(extend, model, key.sharding, sampling)
    text, past, filled = list(ids), None, 0
    for i in range(n_new):
        at = jax.random.fold_in(key, i)
        if past is None or filled == model.context:
            # All that fits of the prompt; of a text that has outgrown the window, half of it, so
            # that it is read again only after as many tokens.
            kept = text[-(model.context if past is None else max(1, model.context // 2)) :]
            window = np.zeros((1, model.context), np.int32)
            window[0, : len(kept)] = kept
            token, past = reread(params, window, len(kept), at)
            filled = len(kept)
        else:
            token, past = go_on(params, np.full((1, 1), text[-1], np.int32), past, filled, at)
            filled += 1
        text.append(int(token))
    return text[len(ids) :]


def check(sampling: Sampling) -> None:
    """Refuses what cannot be drawn from."""
    if not sampling.temperature >= 0:
        raise UserError(f"--temperature is {sampling.temperature}: give 0 or more.")
    if sampling.top_k < 1:
        raise UserError(f"--top-k is {sampling.top_k}: give at least 1.")


@functools.lru_cache(maxsize=2)  # many texts of one model are written one after the other
def make_steps(
    extend: Extend, model: ModelConfig, everywhere: Any, sampling: Sampling
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions to the next token and the past: from a whole window, and from one.

    The token goes `everywhere`, so that each process can read it.
    """

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        best, tokens = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))
        if sampling.temperature == 0:
            return tokens[0]
        return tokens[jax.random.categorical(key, best / sampling.temperature)]

    @functools.partial(jax.jit, out_shardings=(everywhere, None))
    def reread(
        params: optax.Params, window: ArrayLike, length: ArrayLike, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        # What lies behind `length` is seen by no token before it, and is written over later.
        logits, past = extend(params, window, no_tokens(model, rows=1), 0)
        return draw(logits[0, jnp.asarray(length) - 1], key), past

    @functools.partial(jax.jit, out_shardings=(everywhere, None), donate_argnums=2)
    def go_on(
        params: optax.Params, token: ArrayLike, past: Any, filled: jax.Array | int, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        logits, past = extend(params, token, past, filled)
        return draw(logits[0, 0], key), past

    return reread, go_on


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
