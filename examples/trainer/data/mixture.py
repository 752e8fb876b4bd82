"""A mixture of texts: each row of a batch is from one of them, by a rule that needs no state.

Rows are counted through all steps, and BLOCK of them make a block. In each block a text with the
share w has about w BLOCK rows, at places that a permutation of the block's number chooses. So the
place of a row says which text it is from and how many rows of that text come before its block, and
with them the window: each text has its own order, and its own epochs. (Blocks with fixed counts are
those of Levanter: src/levanter/data/mixture.py @9263f81.)
"""

from dataclasses import dataclass

import numpy as np

from examples.trainer.data.cache import Dataset
from examples.trainer.data.loader import Batches, Loader, Tokens, positions
from examples.trainer.data.order import feistel
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

BLOCK = 4096  # rows; shares are multiples of 1 / BLOCK
ROWS = 2**32  # the stream of the permutations of blocks, which is that of no text


@dataclass(frozen=True)
class Mixture:
    """Batches of windows of several texts, one loader for each."""

    loaders: tuple[Loader, ...]
    counts: tuple[int, ...]
    """Rows of each text in a block; their sum is BLOCK."""

    @property
    def context(self) -> int:
        return self.loaders[0].context

    @property
    def batch_size(self) -> int:
        return self.loaders[0].batch_size

    def batch(self, step: int, rows: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        source, places = self.sources(positions(step, self.batch_size, rows))
        read = np.empty((len(source), self.context + 1), np.int32)
        for number in np.unique(source):
            own = source == number
            read[own] = self.loaders[number].read(places[own])
        return read[:, :-1], read[:, 1:]

    def epochs(self, steps: int) -> list[float]:
        shares = [count / BLOCK for count in self.counts]
        return [x * loader.epochs(steps)[0] for x, loader in zip(shares, self.loaders, strict=True)]

    def sources(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The texts (n,) of rows (n,), and their places in the epochs of these texts (n,)."""
        blocks, slots = np.divmod(rows, BLOCK)
        slots = feistel(slots, BLOCK, self.loaders[0].seed, blocks, ROWS)
        ends = np.cumsum(self.counts)
        source = np.searchsorted(ends, slots, side="right")
        counts = np.asarray(self.counts)[source]
        return source, blocks * counts + slots - (ends[source] - counts)


def loader_of(config: RunConfig, dataset: Dataset) -> Batches:
    """The batches of a run; raises `UserError` if there is too little text for one."""

    def loader(text: Tokens, stream: int = 0) -> Loader:
        size, context, order = config.batch_size, config.model.context, config.data.order
        return Loader(text.ids, context, size, config.seed, order, stream)

    if not dataset.parts:
        return enough(loader(dataset.train), "", config.batch_size)
    parts = list(enumerate(dataset.parts))
    loaders = tuple(enough(loader(part.train, i), part.name, 1) for i, part in parts)
    return Mixture(loaders, tuple(part.rows for _, part in parts))


def enough(loader: Loader, name: str, rows: int) -> Loader:
    """The loader, if its text has so many rows."""
    if loader.n_windows < rows:
        raise UserError(
            f"too little training text{f' in {name}' if name else ''}: {len(loader.ids)} tokens, "
            f"and a {'row of it' if name else 'batch'} needs {rows} x {loader.context}. Give more "
            "text, or a smaller --batch-size or --model.context."
        )
    return loader
