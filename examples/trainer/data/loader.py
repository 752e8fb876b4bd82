"""Batches of tokens as a function of seed and step."""

from dataclasses import dataclass

import numpy as np

from examples.trainer.data.order import permuted
from examples.trainer.data.token_files import Slices
from examples.trainer.settings.data import Order


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
    order: Order = "feistel-1"
    stream: int = 0
    """Tells the orders of several texts with one seed apart."""

    @property
    def n_windows(self) -> int:
        return max(0, (len(self.ids) - 1) // self.context)

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (rows, context) of a step counted from 0.

        `rows` are the rows of the batch that this process needs; None for all of them.
        """
        read = self.read(positions(step, self.batch_size, rows))
        return read[:, :-1], read[:, 1:]

    def epochs(self, steps: int) -> list[float]:
        """How often the text is read in so many steps."""
        return [steps * self.batch_size / self.n_windows]

    def read(self, places: np.ndarray) -> np.ndarray:
        """The windows (n, context + 1) at places (n,) of the sequence of all epochs."""
        epochs, indices = np.divmod(places, self.n_windows)
        chosen = permuted(self.order, indices, self.n_windows, self.seed, epochs, self.stream)
        return np.stack([self.window(i) for i in chosen]).astype(np.int32)

    def window(self, index: int) -> np.ndarray:
        """The `index`-th window of the text, its last target included."""
        start = int(index) * self.context
        return self.ids[start : start + self.context + 1]


def positions(step: int, batch_size: int, rows: range | None) -> np.ndarray:
    """The places of rows of a step among the rows of all steps."""
    return step * batch_size + np.arange(batch_size)[slice(None) if rows is None else rows]
