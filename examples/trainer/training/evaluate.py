"""Validation loss, perplexity and bits per byte."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import optax
from jax.sharding import Mesh

from examples.trainer.data.loader import Loader, enough, place_batch, positions
from examples.trainer.data.token_files import Tokens
from examples.trainer.models import sharding
from examples.trainer.settings.run import RunConfig
from examples.trainer.training.loss import NO_TARGET
from examples.trainer.training.step import Loss

LARGEST = 700.0  # nats; the exponential of 710 overflows


def perplexity(loss: float) -> float:
    """exp(loss), of at most LARGEST: more would overflow, and says nothing."""
    return math.exp(min(loss, LARGEST))


def short(value: float, form: str = ".2f") -> str:
    """A number, in powers of ten where it would take a line."""
    return format(value, form if abs(value) < 1e7 else form.replace("f", "e"))


def evaluate(
    loss_of: Loss, params: optax.Params, config: RunConfig, val: Tokens, mesh: Mesh
) -> dict[str, float]:
    """Measures on the same validation batches; bits per byte compare between tokenizers."""
    loader, n_batches = batches(config, val)
    rows = sharding.of_batch(mesh)
    full = min(n_batches, loader.n_windows / loader.batch_size)  # a part of the last one counts
    losses = [loss_of(params, *place_batch(loader, i, rows)) for i in range(n_batches)]
    # A mean over all rows of a batch, of which those that fill it up count nothing.
    loss = math.fsum(map(float, losses)) / full
    return {
        "val_loss": loss,
        "val_perplexity": perplexity(loss),
        "val_bits_per_byte": loss / math.log(2) * len(val.ids) / val.bytes,
    }


@dataclass(frozen=True)
class Once(Loader):
    """Batches of an epoch. Rows that fill up the last one are of the next, without targets."""

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = super().batch(step, rows)
        counts = positions(step, self.batch_size, rows) < self.n_windows
        return inputs, np.where(counts[:, None], targets, NO_TARGET)


def batches(config: RunConfig, val: Tokens) -> tuple[Loader, int]:
    """The batches that are always evaluated, as large as micro-batches, and their number."""
    size = config.batch_size // config.accumulate
    loader = Once(val.ids, config.model.context, size, 0)
    enough(dataclasses.replace(loader, batch_size=1), "validation")
    return loader, min(config.eval_batches * config.accumulate, -(-loader.n_windows // size))
