"""Validation loss, perplexity and bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import optax
from jax.sharding import Mesh

from examples import sharding
from examples.config import RunConfig
from examples.data.loader import Loader, Tokens
from examples.data.placement import place_batch
from examples.errors import UserError
from examples.training import Loss


@dataclass(frozen=True)
class Evaluation:
    """What was measured on the validation text."""

    val_loss: float
    """Nats per token."""
    val_perplexity: float
    val_bits_per_byte: float
    """The measure that does not depend on the tokenizer."""


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """Bits needed for a byte of text, when `n_bytes` of text are `tokens` tokens."""
    return nats_per_token / math.log(2) * tokens / n_bytes


def make_evaluate(
    loss_of: Loss, config: RunConfig, val: Tokens, mesh: Mesh
) -> Callable[[optax.Params], Evaluation]:
    """A function from parameters to their evaluation, each time on the same batches."""
    # As many rows at once as a step has: what fits into memory there fits here.
    loader = Loader(val.ids, config.model.context, config.batch_size // config.accumulate, seed=0)
    place = sharding.of_batch(mesh)
    n_batches = min(config.eval_batches, loader.n_windows // config.batch_size) * config.accumulate
    if n_batches == 0:
        raise UserError(
            f"too little validation text: {val.meta.tokens} tokens, and a batch needs "
            f"{config.batch_size} x {config.model.context}. Give more text, a larger "
            "--data.val-fraction, or a smaller --batch-size or --model.context."
        )

    def evaluate(params: optax.Params) -> Evaluation:
        losses = [loss_of(params, *place_batch(loader, i, place)) for i in range(n_batches)]
        loss = math.fsum(map(float, losses)) / n_batches
        return Evaluation(
            val_loss=loss,
            # Beyond this the number says nothing, and exp would overflow.
            val_perplexity=math.exp(min(loss, 700.0)),
            val_bits_per_byte=bits_per_byte(loss, val.meta.tokens, val.meta.bytes),
        )

    return evaluate
