"""Tokens, and batches of them that are a function of the seed and the step."""

import bisect
import functools
import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokensMeta:
    """What must be known of stored tokens to read them and to trust them."""

    dtype: str
    tokens: int
    bytes: int
    """Size in UTF-8 of the text that the tokens stand for."""
    sha256: str
    """Of the tokens; of several shards, that of their hashes."""


class Joined:
    """Arrays one after the other, as if they were one: a slice copies no more than itself.

    So a window may begin in one shard and end in the next, and batches do not depend on where
    a text was cut into shards.
    """

    def __init__(self, parts: list[np.ndarray]):
        self.parts = parts
        self.starts = list(itertools.accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        first = min(bisect.bisect_right(self.starts, start), len(self.parts)) - 1
        pieces = [self.parts[first][start - self.starts[first] : stop - self.starts[first]]]
        following = first + 1
        while following < len(self.parts) and self.starts[following] < stop:
            pieces.append(self.parts[following][: stop - self.starts[following]])
            following += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class Tokens:
    """A tokenized text."""

    ids: np.ndarray | Joined
    meta: TokensMeta


@dataclass(frozen=True)
class Loader:
    """Batches of windows of a text: stateless, so the step alone says where a run is.

    The text is cut into windows of `context` tokens plus the one to predict last. An epoch
    is a random order of all windows, another one each time; batches run across its end.
    """

    ids: np.ndarray | Joined
    context: int
    batch_size: int
    seed: int

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return max(0, (len(self.ids) - 1) // self.context)

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (rows, context) of a step counted from 0.

        `rows` are those of the batch that this process needs; all of them if None.
        """
        rows = range(self.batch_size) if rows is None else rows
        places = [divmod(step * self.batch_size + row, self.n_windows) for row in rows]
        windows = [self.window(order(self.seed, epoch, self.n_windows)[i]) for epoch, i in places]
        stacked = np.stack(windows).astype(np.int32)
        return stacked[:, :-1], stacked[:, 1:]

    def window(self, index: int) -> np.ndarray:
        """The `index`-th window of the text, its last target included."""
        start = int(index) * self.context
        return self.ids[start : start + self.context + 1]


@functools.lru_cache(maxsize=4)
def order(seed: int, epoch: int, n_windows: int) -> np.ndarray:
    """The order of the windows in an epoch.

    It is held in full, in 8 bytes a window: 0.6 GB for the paper's 72 billion tokens in windows
    of 1024.
    """
    return np.random.default_rng((seed, epoch)).permutation(n_windows)
