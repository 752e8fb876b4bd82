"""Tokens in a memory-mapped file, and batches that are a function of the seed and the step."""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.errors import DamagedFileError
from examples.files import write_atomically


@dataclass(frozen=True)
class TokensMeta:
    """What must be known of a token file to read it and to trust it."""

    dtype: str
    tokens: int
    bytes: int
    """Size in UTF-8 of the text that the tokens stand for."""
    sha256: str


@dataclass(frozen=True)
class Tokens:
    """A tokenized text."""

    ids: np.ndarray
    meta: TokensMeta


def write_tokens(path: Path, ids: Iterable[list[int]], n_bytes: int, vocab_size: int) -> TokensMeta:
    """Stores the ids of documents one after the other; `n_bytes` is the size of their text."""
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    content = b"".join(np.asarray(document, dtype).tobytes() for document in ids)
    write_atomically(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return TokensMeta(dtype.name, len(content) // dtype.itemsize, n_bytes, digest)


def open_tokens(path: Path, meta: TokensMeta) -> Tokens:
    """Maps stored tokens; raises `DamagedFileError` if the file is not as `meta` says."""
    try:
        ids = np.memmap(path, dtype=meta.dtype, mode="r")
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read as tokens: {error}.") from None
    if len(ids) != meta.tokens or hashlib.sha256(ids.data).hexdigest() != meta.sha256:
        raise DamagedFileError(f"{path} is truncated or from elsewhere.")
    return Tokens(ids, meta)


@dataclass(frozen=True)
class Loader:
    """Batches of windows of a text: stateless, so the step alone says where a run is.

    The text is cut into windows of `context` tokens plus the one to predict last. An epoch
    is a random order of all windows, another one each time; batches run across its end.
    """

    ids: np.ndarray
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
    """The order of the windows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n_windows)
