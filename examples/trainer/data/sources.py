"""The texts of a mixture: how many rows each has, and all of them as one text."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from examples.trainer.data.bin_files import is_bin
from examples.trainer.data.cache import Dataset, Part
from examples.trainer.data.loader import Joined, Tokens, TokensMeta
from examples.trainer.data.mixture import BLOCK
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError

HUB = "hub:"


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
    """The texts of SOURCE=WEIGHT, and how many rows of a block each has."""
    weights: dict[str, float] = {}
    for word in given:
        source, _, number = word.rpartition("=")
        weight = as_number(number)
        if not source or not 0 < weight < math.inf:
            raise UserError(
                f"--data.mixture {word}: give SOURCE=WEIGHT with a positive weight, as tokens=0.7."
            )
        if source in weights:
            raise UserError(f"--data.mixture names {source} twice: give it once.")
        weights[source] = weight
    return {source: rows for source, rows in zip(weights, apportioned(weights), strict=True)}


def as_number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def apportioned(weights: dict[str, float]) -> list[int]:
    """The rows of each text in a block, by the largest remainders."""
    largest = max(weights.values())
    relative = [weight / largest for weight in weights.values()]
    exact = [BLOCK * x / math.fsum(relative) for x in relative]
    rows = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(rows)), key=lambda i: rows[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(rows)]:
        rows[i] += 1
    for (source, weight), own in zip(weights.items(), rows, strict=True):
        if not own:
            raise UserError(
                f"--data.mixture {source}={weight:g} is too little for one row of {BLOCK}: give a "
                "larger weight, or leave it out."
            )
    return rows


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
    train, val = joined([part.train for part in parts]), joined([part.val for part in parts])
    content = " ".join(f"{rows} {text.key}" for rows, text in texts.values())
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = [text.lost for _, text in texts.values() if text.lost is not None]
    lost = max(known, default=None)
    return replace(one, train=train, val=val, key=key, parts=parts, lost=lost)


def joined(texts: Sequence[Tokens]) -> Tokens:
    """All tokens, one text after the other."""
    metas = [text.meta for text in texts]
    digest = hashlib.sha256("".join(meta.sha256 for meta in metas).encode()).hexdigest()
    n_tokens, n_bytes = (sum(getattr(x, name) for x in metas) for name in ("tokens", "bytes"))
    meta = TokensMeta(metas[0].dtype, n_tokens, n_bytes, digest)
    return Tokens(Joined([text.ids for text in texts]), meta)
