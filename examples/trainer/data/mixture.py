"""A mixture of texts: each row of a batch is from one of them, by a rule that needs no state.

Rows are counted through all steps, and BLOCK of them make a block. In each block a text with the
share w has about w BLOCK rows, at places that a permutation of the block's number chooses. So the
place of a row says which text it is from and how many rows of that text come before its block, and
with them the window: each text has its own order, and its own epochs. (Blocks with fixed counts are
those of Levanter: src/levanter/data/mixture.py @9263f81.)
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from examples.trainer.data.bin_files import is_bin
from examples.trainer.data.loader import Loader, feistel, positions
from examples.trainer.data.token_files import Tokens, joined
from examples.trainer.data.token_folder import Dataset, Part
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

BLOCK = 4096  # rows; shares are multiples of 1 / BLOCK
ROWS = 2**32  # the stream of the permutations of blocks, which is that of no text
HUB = "hub:"


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


Batches = Loader | Mixture


def loader_of(config: RunConfig, dataset: Dataset) -> Batches:
    """The batches of a run; raises `UserError` if there is too little text for one."""

    def loader(text: Tokens, stream: int = 0) -> Loader:
        size, context, order = config.batch_size, config.model.context, config.data.order
        return Loader(text.ids, context, size, config.seed, order, stream)

    if not dataset.parts:
        return enough(loader(dataset.train), "training", "", config.batch_size)
    parts = list(enumerate(dataset.parts))
    loaders = tuple(enough(loader(part.train, i), "training", part.name, 1) for i, part in parts)
    return Mixture(loaders, tuple(part.rows for _, part in parts))


def enough(loader: Loader, split: str, name: str, rows: int) -> Loader:
    """The loader, if its text has so many rows."""
    if loader.n_windows < rows:
        larger = ", a larger --data.val-fraction" if split == "validation" else ""
        raise UserError(
            f"too little {split} text{f' in {name}' if name else ''}: {len(loader.ids)} tokens, and"
            f" a {'batch' if rows > 1 else 'row of it'} needs {rows} x {loader.context}. Give more"
            f" text{larger}, or a smaller --batch-size or --model.context."
        )
    return loader


# The texts of a mixture


def settings_of(source: str, config: DataConfig) -> DataConfig:
    """The settings of one text of a mixture."""
    one = replace(config, mixture=())
    if source.startswith(HUB):
        return replace(one, hub=source.removeprefix(HUB))
    if not Path(source).is_dir():
        raise UserError(
            f"--data.mixture {source}: there is no such folder. Give one that `python -m "
            f"examples.data prepare` has made, one with .bin files, or {HUB}NAME."
        )
    kind = "bin" if any(map(is_bin, Path(source).iterdir())) else "prepared"
    return replace(one, source=kind, paths=(source,))


def rows_of(given: Sequence[str]) -> dict[str, int]:
    """The texts of SOURCE=WEIGHT, and how many rows of a block each has, by largest remainders."""
    weights: dict[str, float] = {}
    for word in given:
        source, _, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not source or not 0 < weight < math.inf:
            raise UserError(
                f"--data.mixture {word}: give SOURCE=WEIGHT with a positive weight, as tokens=0.7."
            )
        if source in weights:
            raise UserError(f"--data.mixture names {source} twice: give it once.")
        weights[source] = weight
    relative = np.array(list(weights.values())) / max(weights.values())
    exact = BLOCK * relative / math.fsum(relative)
    rows = np.floor(exact).astype(int)
    rows[np.argsort(rows - exact, kind="stable")[: BLOCK - rows.sum()]] += 1
    for source, own in zip(weights, rows, strict=True):
        if not own:
            raise UserError(
                f"--data.mixture {source}={weights[source]:g} is too little for one row of {BLOCK}:"
                " give a larger weight, or leave it out."
            )
    return dict(zip(weights, map(int, rows), strict=True))


def mixed(texts: dict[str, tuple[int, Dataset]]) -> Dataset:
    """One text of several, each given with its rows of a block; they have one tokenizer."""
    (first, (_, one)), *others = texts.items()
    for name, (_, other) in others:
        if other.tokenizer.to_str() != one.tokenizer.to_str():
            raise UserError(
                f"--data.mixture: the tokenizers of {first} and of {name} are not the same. Prepare"
                " both with one; --data.tokenizer FILE names that of .bin files and of the hub."
            )
    parts = tuple(Part(name, rows, x.train, x.val) for name, (rows, x) in texts.items())
    train, val = (together([getattr(part, split) for part in parts]) for split in ("train", "val"))
    content = " ".join(f"{rows} {text.key}" for rows, text in texts.values())
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = [text.lost for _, text in texts.values() if text.lost is not None]
    lost = max(known, default=None)
    return replace(one, train=train, val=val, key=key, parts=parts, lost=lost)


def together(texts: Sequence[Tokens]) -> Tokens:
    """All tokens, one text after the other."""
    return joined(
        [x.ids for x in texts], sum(x.meta.bytes for x in texts), [x.meta.sha256 for x in texts]
    )
