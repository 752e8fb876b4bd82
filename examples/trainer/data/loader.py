"""Tokens, and batches of tokens as a function of seed and step."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from examples.trainer.data.order import permuted
from examples.trainer.settings.data import Order


@dataclass(frozen=True)
class TokensMeta:
    """The facts about stored tokens that are needed to read and to verify them."""

    dtype: str
    tokens: int
    bytes: int
    """Size in UTF-8 of the text that the tokens stand for."""
    sha256: str
    """Hash of the tokens; for several shards, the hash of their hashes."""


class Slices(Protocol):
    """What has a length and can be cut: an array, or a shard on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class Joined:
    """Arrays that are read as if they were concatenated; a slice copies only its own elements.

    So a window may begin in one shard and end in the next, and batches do not depend on where
    a text was cut into shards.
    """

    def __init__(self, parts: Sequence[Slices]):
        self.parts = parts
        self.starts = list(itertools.accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        first = bisect.bisect_right(self.starts, start, hi=len(self.parts)) - 1
        after = max(first + 1, bisect.bisect_left(self.starts, stop, hi=len(self.parts)))
        pieces = [
            part[max(0, start - begin) : max(0, stop - begin)]
            for part, begin in zip(self.parts[first:after], self.starts[first:after], strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class Tokens:
    """A tokenized text."""

    ids: np.ndarray | Joined
    meta: TokensMeta


class Batches(Protocol):
    """What gives batches. It has no state: a batch is a function of the step."""

    @property
    def context(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (rows, context) of a step counted from 0.

        `rows` are the rows of the batch that this process needs; None for all of them.
        """
        ...

    def epochs(self, steps: int) -> list[float]:
        """How often each text is read in so many steps."""
        ...


@dataclass(frozen=True)
class Loader:
    """Batches of windows of a text.

    The text is cut into windows of `context` tokens plus the last target. An epoch is a random
    order of all windows, different each time; a batch may span two epochs.
    """

    ids: np.ndarray | Joined
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
        read = self.read(positions(step, self.batch_size, rows))
        return read[:, :-1], read[:, 1:]

    def epochs(self, steps: int) -> list[float]:
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
