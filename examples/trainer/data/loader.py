"""Batches of tokens as a function of seed and step.

Each process reads only the rows of its own devices. Windows are read in the order of permutations
that NumPy draws for each epoch: 140 MB for the paper's longest run, of 72 billion tokens.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.trainer.data.token_files import Slices
from examples.trainer.system.errors import UserError

NO_TARGET = -1  # of rows that fill up a batch


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def order(size: int, seed: int, epoch: int) -> np.ndarray:
    """The windows of an epoch, each once."""
    return np.random.default_rng((seed, epoch)).permutation(size)


@dataclass(frozen=True)
class Loader:
    """Batches of windows of a text. It has no state: a batch is a function of the step.

    The text is cut into windows of `context` tokens plus the last target. An epoch is a random
    order of all windows, different each time; a batch may span two epochs.
    """

    ids: Slices
    context: int
    batch_size: int
    seed: int
    once: bool = False
    """Leave out the targets of rows after the first epoch; such rows fill up its last batch."""

    @property
    def n_windows(self) -> int:
        return max(0, (len(self.ids) - 1) // self.context)

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (rows, context) of a step from 0 on; `rows` None: all of them."""
        places = step * self.batch_size + np.array(range(self.batch_size) if rows is None else rows)
        epochs, indices = np.divmod(places, self.n_windows)
        pairs = zip(epochs.tolist(), indices.tolist(), strict=True)
        windows = [order(self.n_windows, self.seed, epoch)[i] for epoch, i in pairs]
        starts = [int(window) * self.context for window in windows]
        found = np.stack([self.ids[start : start + self.context + 1] for start in starts])
        inputs, targets = found[:, :-1].astype(np.int32), found[:, 1:].astype(np.int32)
        return inputs, np.where(self.once & (epochs > 0)[:, None], NO_TARGET, targets)


def check_enough(loader: Loader, split: str) -> None:
    """Refuses a text without a whole batch."""
    if loader.n_windows < loader.batch_size:
        raise UserError(
            f"too little {split} text: {len(loader.ids)} tokens, and it needs"
            f" {loader.batch_size} x {loader.context}. Give more text, or a smaller"
            " --batch-size or --model.context; --data.val-fraction is the share for validation."
        )


def place_batch(loader: Loader, step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, with the given sharding; reads only rows of this process."""
    shape = (loader.batch_size, loader.context)

    @functools.cache  # devices with the same rows, such as those along `tensor`, share one read
    def read(rows: range) -> tuple[np.ndarray, np.ndarray]:
        return loader.batch(step, rows)

    def part(i: int, index: Any) -> np.ndarray:
        return read(range(*index[0].indices(loader.batch_size)))[i]

    inputs, targets = (
        jax.make_array_from_callback(shape, sharding, functools.partial(part, i)) for i in (0, 1)
    )
    return inputs, targets
