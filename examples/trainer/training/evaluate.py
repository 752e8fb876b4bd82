"""Validation loss, perplexity and bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import optax
from jax.sharding import Mesh

from examples.trainer.data.loader import Loader, Tokens
from examples.trainer.data.placement import place_batch
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.model_function import Loss


@dataclass(frozen=True)
class Evaluation:
    """Measures on the validation text."""

    val_loss: float
    """Nats per token."""
    val_perplexity: float
    val_bits_per_byte: float
    """Unlike the other two, comparable between tokenizers."""


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """Bits per byte of a text of `n_bytes` bytes and `tokens` tokens."""
    return nats_per_token / math.log(2) * tokens / n_bytes


def make_evaluate(
    loss_of: Loss, config: RunConfig, val: Tokens, mesh: Mesh
) -> Callable[[optax.Params], Evaluation]:
    """A function from parameters to their evaluation, always on the same batches."""
    # Batches as large as the micro-batches of a step, which are known to fit into memory.
    size = config.batch_size // config.accumulate
    loader = Loader(val.ids, config.model.context, size, 0, config.data.order)
    rows = sharding.of_batch(mesh)
    n_batches = min(config.eval_batches, loader.n_windows // config.batch_size) * config.accumulate
    if n_batches == 0:
        raise UserError(
            f"too little validation text: {val.meta.tokens} tokens, and a batch needs "
            f"{config.batch_size} x {config.model.context}. Give more text, a larger "
            "--data.val-fraction, or a smaller --batch-size or --model.context."
        )

    def evaluate(params: optax.Params) -> Evaluation:
        losses = [loss_of(params, *place_batch(loader, i, rows)) for i in range(n_batches)]
        loss = math.fsum(map(float, losses)) / n_batches
        return Evaluation(
            val_loss=loss,
            # Perplexities above exp(700) would overflow, and say nothing.
            val_perplexity=math.exp(min(loss, 700.0)),
            val_bits_per_byte=bits_per_byte(loss, val.meta.tokens, val.meta.bytes),
        )

    return evaluate
