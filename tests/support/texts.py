"""One text as prepared folders and .bin files have it."""

import json
from pathlib import Path

import numpy as np

from examples import data
from examples.trainer.data import tokenizer


def documents(seed: int, count: int = 60) -> list[str]:
    """Documents of words that no document of another seed has."""
    rows = np.random.default_rng(seed).integers(30, size=(count, 40))
    return [" ".join(f"{chr(97 + seed)}{i}" for i in row) for row in rows]


def make_tokenizer(path: Path) -> Path:
    """Writes a tokenizer of 300 tokens for documents of the first seeds."""
    tokenizer.train((text for seed in range(3) for text in documents(seed, 9)), 300).save(str(path))
    return path


def prepared(folder: Path, words: Path, seed: int) -> Path:
    """A folder of `examples.data prepare`."""
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(seed)))
    given = ["--out", folder, "--paths", rows, "--tokenizer", words, "--val-fraction", "0.3"]
    assert data.main(["prepare", *map(str, given)]) == 0
    return folder


def bins(folder: Path, words: Path, seed: int) -> Path:
    """A folder of .bin files, without headers."""
    folder.mkdir()
    made = tokenizer.load(words)
    for split, texts in (("train", documents(seed)[:40]), ("val", documents(seed)[40:])):
        ids = [i for _, own in tokenizer.encode(made, texts) for i in own]
        np.asarray(ids, "<u2").tofile(folder / f"{split}.bin")
    return folder
