"""Tokens on disk in llm.c's form, and texts of several files, read window by window.

A file begins with 256 little-endian int32, of which the first three are a magic number, a version
and the number of tokens: 20240520 and 1 before uint16, 20240801 and 7 before uint32
(karpathy/llm.c, dev/data/data_common.py; modded-nanogpt has the first of them).
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError

HEADER = 256
HEADER_BYTES = 4 * HEADER
KINDS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Magic number to version and type of the tokens."""
BLOCK = 2**20  # tokens that are looked at together


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
        size = max(0, stop - start) * self.dtype.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                same = version_of(os.fstat(file.fileno())) == self.version
                content = os.pread(file.fileno(), size, self.offset + start * self.dtype.itemsize)
        except OSError as error:
            raise DamagedFileError(f"{self.path} cannot be read: {error.strerror}.") from None
        if not same or len(content) != size:
            raise DamagedFileError(
                f"{self.path} was changed after it had been opened: put back the file, and start"
                " again or resume."
            )
        return np.frombuffer(content, self.dtype)


def version_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


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
    """What is known of a tokenized text without reading it."""

    tokens: int
    """Their number."""
    bytes: int
    """Size in UTF-8 of the text that the tokens stand for."""
    sha256: str
    """Hash of the hashes of its files."""


class Tokens(NamedTuple):
    """A tokenized text."""

    ids: Slices
    meta: Meta


def joined(parts: Sequence[Slices], n_bytes: int, hashes: Sequence[str]) -> Tokens:
    """One text of several files, which are given with the hashes of their content."""
    ids = Joined(parts)
    sha256 = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return Tokens(ids, Meta(len(ids), n_bytes, sha256))


def dtype_of(vocab_size: int) -> np.dtype:
    """The type that tokens of a vocabulary are stored as."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write(path: Path, content: bytes, dtype: np.dtype) -> None:
    """Writes tokens, which are given as the bytes of numbers of `dtype`."""
    header = np.zeros(HEADER, "<i4")
    magic = next(number for number, (_, kind) in KINDS.items() if kind == dtype)
    header[:3] = magic, KINDS[magic][0], len(content) // dtype.itemsize
    files.write_atomically(path, header.tobytes() + content)


def open_file(path: Path, plain: np.dtype | None = None) -> TokenFile:
    """The tokens of a file; raises `DamagedFileError` unless its header fits it.

    A file without a header is read as tokens of the type `plain`, if that is given.
    """
    files.check_regular(path)
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            start = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4")
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}.") from None
    version, dtype = KINDS.get(int(start[0]), (None, plain))
    offset = 0 if version is None else HEADER_BYTES
    if dtype is None or version not in (None, start[1]):
        raise DamagedFileError(f"{path} does not begin as a file of tokens of this version.")
    tokens, rest = divmod(max(0, stat.st_size - offset), dtype.itemsize)
    if rest or (version is not None and tokens != start[2]):
        says = "" if version is None else f", of which its header says that it has {start[2]}"
        raise DamagedFileError(
            f"{path} has {tokens} tokens of {dtype.name} and {rest} bytes{says}: it is truncated,"
            " or of another type. Make it again."
        )
    return TokenFile(path, dtype, tokens, offset, version_of(stat))


def blocks(ids: Slices, most: int = 2**62) -> Iterator[np.ndarray]:
    """At most so many tokens, a block at a time."""
    for start in range(0, min(len(ids), most), BLOCK):
        yield ids[start : start + BLOCK]


def check_ids(path: Path, ids: np.ndarray, words: int) -> None:
    """Refuses tokens that are not in a vocabulary of so many words."""
    if ids.max(initial=0) >= words:
        at = int(np.argmax(ids >= words))
        raise DamagedFileError(
            f"{path} has the token {ids[at]}, and the vocabulary has {words} tokens: it is damaged,"
            f" of another tokenizer, or no {ids.dtype.name}."
        )
