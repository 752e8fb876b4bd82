"""Files of tokens, of our own and of nanoGPT, read window by window.

A `.bin` file has tokens and nothing else: uint16, or uint32 where the vocabulary has more than
65,536 tokens.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders

from examples.trainer.data import tokenizer
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

BLOCK = 2**20  # tokens that are looked at together
LOOKED = 2**26  # tokens of each file that are compared with the vocabulary
ROW = 2**12  # tokens that are decoded together
ENOUGH = 32  # tokens above 0: in no text of 16-bit tokens every second one is 0 so often by chance
ENDS_BYTES = 2**20  # of a file, which stand for its content


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a file, which is opened for each slice.

    A memory map would keep a file that was replaced, and end the process with SIGBUS if it becomes
    shorter. Here a file that has changed since it was opened first is an error.
    """

    path: Path
    dtype: np.dtype
    version: tuple[int, int]
    """Size and time of the last change, when it was opened first."""

    def __len__(self) -> int:
        return self.version[0] // self.dtype.itemsize

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        size, offset = max(0, stop - start), start * self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, size, offset=offset)
        if len(found) != size or version_of(self.path) != self.version:
            raise UserError(
                f"{self.path} was changed after it had been opened: put back the file, and start"
                " again or resume."
            )
        return found


def version_of(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


Slices = np.ndarray | TokenFile
"""What has a length and is cut into windows."""


class Tokens(NamedTuple):
    """A tokenized text."""

    ids: Slices
    bytes: int
    """Size in UTF-8 of the text, for bits per byte; 0 for training text of .bin files."""
    digest: str
    """Stands for the content."""


@dataclass(frozen=True)
class Dataset:
    """The text of a run, as tokens."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Identifies the content: equal keys mean equal tokens."""


def dataset(words: Tokenizer, digest: str, train: Tokens, val: Tokens) -> Dataset:
    """A text whose key has `digest` for the tokenizer."""
    digests = (hashlib.sha256(x.digest.encode()).hexdigest() for x in (train, val))
    key = hashlib.sha256(" ".join((digest, *digests)).encode()).hexdigest()[:16]
    return Dataset(words, train, val, key)


def dtype_of(words: Tokenizer) -> np.dtype:
    """The type that tokens are stored as."""
    return np.dtype("<u2" if words.get_vocab_size() <= 2**16 else "<u4")


def open_file(path: Path, dtype: np.dtype) -> TokenFile:
    files.check_regular(path)
    found = TokenFile(path, dtype, version_of(path))
    if rest := found.version[0] % dtype.itemsize:
        raise UserError(
            f"{path} has {len(found)} tokens of {dtype.name} and {rest} bytes: it is truncated, or"
            " of another type. Make it again."
        )
    return found


def read_bins(config: DataConfig) -> Dataset:
    """The text of files that nanoGPT wrote."""
    # Files that are missing are named before a tokenizer is fetched.
    paths = [bin_of(config.paths, split) for split in ("train", "val")]
    words = tokenizer.named(config.tokenizer or "gpt2", config.end_token)
    ids = [open_file(path, dtype_of(words)) for path in paths]
    for one in ids:
        check_ids(one, words.get_vocab_size())
    digests = [digest_of(path) for path in paths]
    if digests[0] == digests[1]:
        raise UserError(
            f"the validation text {paths[1]} is equal to the training text, so that the loss would"
            " be that of text that was trained on: give other validation text."
        )
    # Bits per byte need the bytes of the validation text alone.
    train, val = map(Tokens, ids, (0, count_bytes(words, ids[1])), digests)
    return dataset(words, words.to_str(), train, val)


def bin_of(paths: Sequence[str], split: str) -> Path:
    """The .bin file with `train` or `val` in its name, of those given and in folders given."""
    if characters := [x / "meta.pkl" for x in map(Path, paths) if (x / "meta.pkl").exists()]:
        raise UserError(
            f"{characters[0]} says that these tokens are nanoGPT's characters, which no tokenizer"
            " here knows. Give the text itself as --data.paths, without --data.source bin."
        )
    inside = [sorted(x.iterdir()) if x.is_dir() else [x] for x in map(Path, paths)]
    found = [
        path
        for path in itertools.chain.from_iterable(inside)
        if path.suffix.lower() == ".bin" and split in re.split(r"[^a-z]+", path.name.lower())
    ]
    if len(found) != 1:
        raise UserError(
            f"there are {len(found) or 'no'} files of {split} tokens in "
            f"{', '.join(paths) or 'no --data.paths'}: give one, as {split}.bin, or a folder with"
            " one; several are joined by cat."
        )
    return found[0]


def check_ids(found: TokenFile, words: int) -> None:
    """Refuses wider numbers, and tokens that are not in a vocabulary of so many words."""
    first = found[:BLOCK]
    if np.count_nonzero(first) >= ENOUGH and not first[1::2].any():
        raise UserError(
            f"{found.path} seems to hold numbers of more bits than {found.dtype.name}, as every"
            " second one is 0. Write it again as that, by np.fromfile(PATH, TYPE)"
            f".astype({found.dtype.str!r}).tofile(PATH)."
        )
    for start in range(0, min(len(found), LOOKED), BLOCK):
        if (largest := found[start : start + BLOCK].max()) >= words:
            raise UserError(
                f"{found.path} has the token {largest}, and the vocabulary has {words} tokens: it"
                f" is damaged, of another --data.tokenizer, no {found.dtype.name}, or has a header,"
                f" as llm.c's. np.fromfile(PATH, {found.dtype.str!r}, offset=1024).tofile(PATH)"
                " leaves that out."
            )


def count_bytes(words: Tokenizer, ids: Slices) -> int:
    """The size in UTF-8 of the text of tokens; a character that a row cuts counts more."""
    own, size = Tokenizer.from_str(words.to_str()), 0
    if own.decoder is None:
        own.decoder = decoders.Fuse()  # else there would be spaces between tokens
    rows = (ids[start : start + ROW].tolist() for start in range(0, len(ids), ROW))
    while batch := list(itertools.islice(rows, 256)):
        size += sum(len(text.encode()) for text in own.decode_batch(batch))
    return size


def digest_of(path: Path) -> str:
    """Stands for the content of a file: its size, its beginning and its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(ENDS_BYTES)
        file.seek(max(0, size - ENDS_BYTES))
        return hashlib.sha256(b"%d" % size + start + file.read()).hexdigest()
