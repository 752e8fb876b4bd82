"""Tokens that another trainer wrote: `.bin` files of nanoGPT, llm.c and modded-nanogpt.

nanoGPT's have no header: they are tokens alone, uint16, or uint32 where the vocabulary has more
than 65,536 tokens.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.trainer.data import token_files
from examples.trainer.data.token_files import TokenFile, Tokens, joined
from examples.trainer.data.token_folder import Dataset, check_apart
from examples.trainer.data.tokenizer import token_bytes
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

ENDS_BYTES = 2**20  # of each file, for the name of the content
ENOUGH = 32  # tokens above 0: in no text of 16-bit tokens every second one is 0 so often by chance
LOOKED = 2**26  # training tokens of each file
SAMPLE = 2**16  # tokens whose bytes are counted twice


def prepare(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Opens the files of both splits; raises `UserError` that names a file that does not fit."""
    found = {split: named(config.paths, split) for split in ("train", "val")}
    hashes = {split: list(map(digest_of, paths)) for split, paths in found.items()}
    check_apart(hashes["train"], hashes["val"], ", ".join(config.paths))
    lengths = token_bytes(tokenizer)
    train = read(found["train"], hashes["train"], lengths, LOOKED)
    val = read(found["val"], hashes["val"], lengths)
    check_bytes(tokenizer, val, lengths)
    content = " ".join((tokenizer.to_str(), train.meta.sha256, val.meta.sha256))
    return Dataset(tokenizer, train, val, hashlib.sha256(content.encode()).hexdigest()[:16])


def named(given: tuple[str, ...], split: str) -> list[Path]:
    """The files with `train` or `val` in their names, of those given and in the folders given."""
    found: list[Path] = []
    for path in map(Path, given):
        if not path.exists():
            raise UserError(f"{path} does not exist: give .bin files or folders of them.")
        if (path / "meta.pkl").exists():
            raise UserError(
                f"{path / 'meta.pkl'} says that these tokens are nanoGPT's characters, of which no"
                " tokenizer here knows. Give the text itself as --data.paths, without --data.source"
                " bin."
            )
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found += [x for x in inside if x.suffix.lower() == ".bin"] if path.is_dir() else [path]
    found = [path for path in found if split in re.split(r"[^a-z]+", path.name.lower())]
    for path in found:
        files.check_regular(path)
    if not any(path.stat().st_size for path in found):
        raise UserError(
            f"there are no {split} tokens in {', '.join(given) or 'no --data.paths'}: give .bin"
            f" files, or their folder, with {split} in the names, as {split}.bin."
        )
    return found


def read(paths: list[Path], hashes: list[str], lengths: np.ndarray, most: int = 2**62) -> Tokens:
    """The tokens of a split, of which at most so many of each file are looked at."""
    parts, n_bytes = [open_file(path, len(lengths)) for path in paths], 0
    for part in parts:
        for block in token_files.blocks(part, most):
            token_files.check_ids(part.path, block, len(lengths))
            n_bytes += int(lengths[block].sum())
    return joined(parts, n_bytes, hashes)


def open_file(path: Path, words: int) -> TokenFile:
    """The tokens of a file with or without a header; refuses wider numbers without one."""
    found = token_files.open_file(path, token_files.dtype_of(words))
    look = found[: token_files.BLOCK] if not found.offset else np.zeros(0)
    if np.count_nonzero(look) >= ENOUGH and not look[1::2].any():
        raise UserError(
            f"{path} seems to hold numbers of more bits than {found.dtype.name}, as every second"
            " one is 0. Write it again as that, by np.fromfile(PATH, TYPE)"
            f".astype({found.dtype.str!r}).tofile(PATH), or with the header of llm.c."
        )
    return found


def check_bytes(tokenizer: Tokenizer, val: Tokens, lengths: np.ndarray) -> None:
    """Refuses tokens whose text has another size than they are counted as."""
    sample = val.ids[:SAMPLE]
    size, counted = len(tokenizer.decode(sample.tolist()).encode()), int(lengths[sample].sum())
    if abs(size - counted) > 8 + counted / 50:  # a character may be cut at either end
        raise UserError(
            f"{len(sample)} validation tokens are {size} bytes of text, and count as {counted}:"
            " bits per byte would be wrong. Give the --data.tokenizer that has written them."
        )


def digest_of(path: Path) -> str:
    """Stands for the content of a file: its size, its beginning and its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(ENDS_BYTES)
        file.seek(max(0, size - ENDS_BYTES))
        return hashlib.sha256(b"%d" % size + start + file.read()).hexdigest()
