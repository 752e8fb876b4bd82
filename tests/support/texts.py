"""Texts as FineWeb and .bin files have them."""

import sys
import types
from pathlib import Path

import numpy as np

from examples.trainer.data import tokenizer


def documents(seed: int, count: int = 60) -> list[str]:
    """Documents of words that no document of another seed has."""
    rows = np.random.default_rng(seed).integers(30, size=(count, 40))
    return [" ".join(f"{chr(97 + seed)}{i}" for i in row) for row in rows]


def make_tokenizer(path: Path) -> Path:
    """Writes a tokenizer of 300 tokens for documents of the first seeds."""
    tokenizer.train([text for seed in range(3) for text in documents(seed, 9)], 300).save(str(path))
    return path


def bins(folder: Path, words: Path, seed: int) -> Path:
    """A folder of .bin files, without headers."""
    folder.mkdir()
    made = tokenizer.load(words)
    for split, texts in (("train", documents(seed)[:40]), ("val", documents(seed)[40:])):
        ids = [i for _, own in tokenizer.encode(made, texts) for i in own]
        np.asarray(ids, "<u2").tofile(folder / f"{split}.bin")
    return folder


class Stream:
    """As much of a `datasets.IterableDataset` as is used; ends with an error after `until` rows."""

    def __init__(self, rows: list[str], until: int | None, skipped: int = 0):
        self.rows, self.until, self.skipped = rows, until, skipped

    def skip(self, n: int) -> "Stream":
        return Stream(self.rows, self.until, n)

    def __iter__(self):
        for i, text in enumerate(self.rows):
            if i == self.until:
                raise ConnectionError("the line was cut")
            if i >= self.skipped:
                yield {"text": text, "id": i}


def serve(monkeypatch, rows: list[str], until: int | None = None) -> None:
    """Lets the package `datasets` give these rows, whatever it is asked for."""
    package = types.SimpleNamespace(load_dataset=lambda *_, **__: Stream(rows, until))
    monkeypatch.setitem(sys.modules, "datasets", package)
