"""Tokens on disk, of our own and of nanoGPT, llm.c and modded-nanogpt, read window by window.

A `.bin` file begins with 256 little-endian int32, of which the first three are a magic number, a
version and the number of tokens: 20240520 and 1 before uint16, 20240801 and 7 before uint32
(karpathy/llm.c, dev/data/data_common.py; modded-nanogpt has the first of them). nanoGPT's files
have no header: they are uint16, or uint32 where the vocabulary has more than 65,536 tokens.
"""

import bisect
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders

from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError, UserError

HEADER = 256  # numbers of 4 bytes
KINDS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Magic number to version and type of the tokens."""
BLOCK = 2**20  # tokens that are looked at together
LOOKED = 2**26  # tokens of each file that are compared with the vocabulary
ROW = 2**12  # tokens that are decoded together
ENOUGH = 32  # tokens above 0: in no text of 16-bit tokens every second one is 0 so often by chance
ENDS_BYTES = 2**20  # of a file, which stand for its content


class Slices(Protocol):
    """What has a length and can be cut: an array, or a file of tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a file, which is opened for each slice.

    A memory map would keep a file that was replaced, and end the process with SIGBUS if it becomes
    shorter. Here a file that has changed since it was opened first is an error.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    offset: int
    version: tuple[int, int]
    """Size and time of the last change."""

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self.tokens)
        size, offset = max(0, stop - start), self.offset + start * self.dtype.itemsize
        stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) == self.version:
            found = np.fromfile(self.path, self.dtype, size, offset=offset)
            if len(found) == size:
                return found
        raise DamagedFileError(
            f"{self.path} was changed after it had been opened: put back the file, and start again"
            " or resume."
        )


class Joined:
    """Arrays that are read as if they were concatenated; a slice copies only its own elements.

    So a window may begin in one file and end in the next, and batches do not depend on where a
    text was cut.
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


class Meta(NamedTuple):
    """What is known of a tokenized text without its tokens."""

    tokens: int
    bytes: int
    sha256: str


class Tokens(NamedTuple):
    """A tokenized text."""

    ids: Slices
    bytes: int
    """Size in UTF-8 of the text, for bits per byte; 0 for training text of .bin files."""
    sha256: str
    """Hash of the hashes of its files."""

    @property
    def meta(self) -> Meta:
        return Meta(len(self.ids), self.bytes, self.sha256)


@dataclass(frozen=True)
class Dataset:
    """The text of a run, as tokens."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Identifies the content: equal keys mean equal tokens."""


def joined(parts: Sequence[Slices], n_bytes: int, hashes: Sequence[str]) -> Tokens:
    """One text of several files, which are given with the hashes of their content."""
    return Tokens(Joined(parts), n_bytes, hashlib.sha256("".join(hashes).encode()).hexdigest())


def dataset(tokenizer: Tokenizer, words: str, train: Tokens, val: Tokens) -> Dataset:
    """A text whose key has `words` for the tokenizer."""
    content = " ".join((words, train.sha256, val.sha256))
    return Dataset(tokenizer, train, val, hashlib.sha256(content.encode()).hexdigest()[:16])


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The type that tokens are stored as."""
    return np.dtype("<u2" if tokenizer.get_vocab_size() <= 2**16 else "<u4")


def write(path: Path, ids: np.ndarray) -> None:
    """Writes tokens of a type of `KINDS`, with a header."""
    header = np.zeros(HEADER, "<i4")
    magic = next(number for number, (_, kind) in KINDS.items() if kind == ids.dtype)
    header[:3] = magic, KINDS[magic][0], len(ids)
    files.write_atomically(path, header.tobytes() + ids.tobytes())


def open_file(path: Path, plain: np.dtype) -> TokenFile:
    """The tokens of a file; without a header they are of the type `plain`."""
    files.check_regular(path)
    stat = path.stat()
    magic, *written = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    version, dtype = KINDS.get(magic, (0, plain))
    offset = 4 * HEADER if version else 0
    tokens, rest = divmod(max(0, stat.st_size - offset), dtype.itemsize)
    if rest or (version and written != [version, tokens]):
        raise DamagedFileError(
            f"{path} has {tokens} tokens of {dtype.name} and {rest} bytes, or another header: it is"
            " truncated, or of another type. Make it again."
        )
    return TokenFile(path, dtype, tokens, offset, (stat.st_size, stat.st_mtime_ns))


def read_bins(paths: Mapping[str, Sequence[Path]], tokenizer: Tokenizer) -> Dataset:
    """The text of files that another trainer wrote, by their split."""
    plain, parts, hashes = dtype_of(tokenizer), {}, {}
    for split, named in paths.items():
        parts[split] = [open_file(path, plain) for path in named]
        hashes[split] = list(map(digest_of, named))
        for part in parts[split]:
            check_ids(part, tokenizer.get_vocab_size())
    if {*hashes["train"]} & {*hashes["val"]}:
        raise UserError(
            f"a file of validation text in {paths['val'][0].parent} is equal to one of training"
            " text, so that the loss would be that of text that was trained on: give other"
            " validation text."
        )
    # Bits per byte need the bytes of the validation text alone.
    n_bytes = {"train": 0, "val": count_bytes(tokenizer, Joined(parts["val"]))}
    train, val = (joined(parts[x], n_bytes[x], hashes[x]) for x in ("train", "val"))
    return dataset(tokenizer, tokenizer.to_str(), train, val)


def bins(paths: Sequence[str], split: str) -> list[Path]:
    """The .bin files with `train` or `val` in their names, of those given and in folders given."""
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
    if not found:
        raise UserError(
            f"there are no {split} tokens in {', '.join(paths) or 'no --data.paths'}: give .bin"
            f" files, or their folder, with {split} in the names, as {split}.bin."
        )
    return found


def check_ids(found: TokenFile, words: int) -> None:
    """Refuses tokens that are not in a vocabulary of so many words, and wider numbers."""
    first = found[:BLOCK]
    if not found.offset and np.count_nonzero(first) >= ENOUGH and not first[1::2].any():
        raise UserError(
            f"{found.path} seems to hold numbers of more bits than {found.dtype.name}, as every"
            " second one is 0. Write it again as that, by np.fromfile(PATH, TYPE)"
            f".astype({found.dtype.str!r}).tofile(PATH), or with the header of llm.c."
        )
    for start in range(0, min(len(found), LOOKED), BLOCK):
        if (largest := found[start : start + BLOCK].max()) >= words:
            raise DamagedFileError(
                f"{found.path} has the token {largest}, and the vocabulary has {words} tokens: it"
                f" is damaged, of another --data.tokenizer, or no {found.dtype.name}."
            )


def count_bytes(tokenizer: Tokenizer, ids: Slices) -> int:
    """The size in UTF-8 of the text that tokens stand for.

    A character that the end of a row of tokens cuts counts a few bytes more.
    """
    own, size = Tokenizer.from_str(tokenizer.to_str()), 0
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
