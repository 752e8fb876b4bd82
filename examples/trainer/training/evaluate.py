"""Validation loss, perplexity and bits per byte."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import optax
from jax.sharding import Mesh

from examples.trainer.data import mixture
from examples.trainer.data.loader import Loader, positions
from examples.trainer.data.placement import place_batch
from examples.trainer.data.token_files import Tokens
from examples.trainer.data.token_folder import Dataset
from examples.trainer.settings.run import RunConfig
from examples.trainer.training import sharding
from examples.trainer.training.loss import NO_TARGET
from examples.trainer.training.step import Loss

LARGEST = 700.0  # nats; the exponential of 710 overflows
LOST = 1e-3  # share of a text; bits per byte are then wrong in their third digit


@dataclass(frozen=True)
class Evaluation:
    """Measures on the validation text."""

    val_loss: float
    """Nats per token."""
    val_perplexity: float
    val_bits_per_byte: float | None
    """Unlike the other two, comparable between tokenizers, unless they lose text: then None."""
    of_parts: dict[str, float] = field(default_factory=dict)
    """The losses of the texts of a mixture, whose mean by weight is `val_loss`."""

    def figures(self) -> dict[str, float]:
        """The measures by their names in `metrics.jsonl`."""
        values = dataclasses.asdict(self)
        values |= {f"val_loss/{name}": x for name, x in values.pop("of_parts").items()}
        return {name: x for name, x in values.items() if x is not None}


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: float) -> float:
    """Bits per byte of a text of `n_bytes` bytes and `tokens` tokens."""
    return nats_per_token / math.log(2) * tokens / n_bytes


def loses_text(lost: float | None) -> bool:
    """Whether a tokenizer loses so much that its bits per byte are not those of the text."""
    return lost is not None and lost > LOST


def in_words(bits: float | None, digits: int) -> str:
    """Bits per byte, or why there are none."""
    return "not comparable: the tokenizer loses text" if bits is None else f"{bits:.{digits}f}"


def perplexity(loss: float) -> float:
    """exp(loss), of at most LARGEST: more would overflow, and says nothing."""
    return math.exp(min(loss, LARGEST))


def short(value: float, form: str = ".2f") -> str:
    """A number, in powers of ten where it would take a line."""
    return format(value, form if abs(value) < 1e7 else form.replace("f", "e"))


def make_evaluate(
    loss_of: Loss, config: RunConfig, data: Dataset, mesh: Mesh
) -> Callable[[optax.Params], Evaluation]:
    """A function from parameters to their evaluation, always on the same batches."""
    parts = [(part.name, part.rows, part.val) for part in data.parts] or [("", 1, data.val)]
    losses = [make_loss(loss_of, config, val, name, mesh) for name, _, val in parts]
    total = sum(rows for _, rows, _ in parts)

    def evaluate(params: optax.Params) -> Evaluation:
        found = [loss(params) for loss in losses]
        loss = math.fsum(x * rows for x, (_, rows, _) in zip(found, parts, strict=True)) / total
        size = math.fsum(rows * val.meta.bytes / val.meta.tokens for _, rows, val in parts) / total
        return Evaluation(
            val_loss=loss,
            val_perplexity=perplexity(loss),
            val_bits_per_byte=None if loses_text(data.lost) else bits_per_byte(loss, 1, size),
            of_parts={part.name: x for part, x in zip(data.parts, found, strict=False)},
        )

    return evaluate


@dataclass(frozen=True)
class Once(Loader):
    """Batches of an epoch. Rows that fill up the last one are of the next, without targets."""

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = super().batch(step, rows)
        counts = positions(step, self.batch_size, rows) < self.n_windows
        return inputs, np.where(counts[:, None], targets, NO_TARGET)


def batches(config: RunConfig, val: Tokens) -> tuple[Loader, int]:
    """The batches that are always evaluated, and their number.

    They are as large as the micro-batches of a step, which are known to fit into memory.
    """
    size = config.batch_size // config.accumulate
    loader = Once(val.ids, config.model.context, size, 0, config.data.order)
    return loader, min(config.eval_batches * config.accumulate, -(-loader.n_windows // size))


def make_loss(
    loss_of: Loss, config: RunConfig, val: Tokens, name: str, mesh: Mesh
) -> Callable[[optax.Params], float]:
    """A function from parameters to their loss on batches of a text."""
    loader, n_batches = batches(config, val)
    mixture.enough(loader, "validation", name, config.batch_size)
    rows = sharding.of_batch(mesh)
    full = min(n_batches, loader.n_windows / loader.batch_size)  # a part of the last one counts

    def loss(params: optax.Params) -> float:
        losses = [loss_of(params, *place_batch(loader, i, rows)) for i in range(n_batches)]
        return math.fsum(map(float, losses)) / full

    return loss
