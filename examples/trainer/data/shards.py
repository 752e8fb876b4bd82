"""Tokens on disk: shards that describe their content in a header, read through memory maps.

A shard is a header of HEADER_BYTES followed by the tokens, little-endian. The header, which
`head -n 2` shows, is a line with the kind and version of the file and a line of JSON (`Header`),
padded with spaces.
"""

import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from examples.trainer.data.loader import Joined, Tokens, TokensMeta
from examples.trainer.settings.validation import problems
from examples.trainer.system.errors import DamagedFileError
from examples.trainer.system.files import write_atomically

MAGIC = b"optax_muonplus tokens, version 1\n"
HEADER_BYTES = 4096  # one memory page, so that the tokens are aligned; a header needs a tenth of it
SHARD_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted download loses
OPEN = 128  # shards that are mapped at the same time; each takes a file descriptor
HASHED_BYTES = 2**28  # larger texts are hashed on request only; this much takes half a second


@dataclass(frozen=True)
class Stamp:
    """The tokenizer that made a shard."""

    name: str
    sha256: str
    """Hash of its tokenizer.json."""
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class Header:
    """The beginning of a shard."""

    tokenizer: Stamp
    tokens: TokensMeta
    read: int
    """Documents of the source that had been read when the shard was finished."""
    sha256: str = ""
    """Hash of the fields above; empty in shards of earlier versions."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(replace(self, sha256=""))).encode()).hexdigest()


@dataclass
class Writer:
    """Collects tokens in memory and writes them as FOLDER/NAME-00000.bin, NAME-00001.bin, ..."""

    folder: Path
    name: str
    stamp: Stamp
    written: list[str] = field(default_factory=list)
    """Hashes of the shards that are on disk."""
    n_tokens: int = 0
    """Tokens not yet written."""
    n_bytes: int = 0
    """Size of the text of those tokens, in UTF-8."""
    parts: list[bytes] = field(default_factory=list)

    def add(self, ids: list[int], n_bytes: int) -> None:
        """Adds a document whose text is `n_bytes` long."""
        self.parts.append(np.asarray(ids, self.stamp.dtype).tobytes())
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes

    @property
    def is_full(self) -> bool:
        return self.n_tokens >= SHARD_TOKENS

    def flush(self, read: int) -> None:
        """Writes the collected tokens as one shard, after `read` documents of the source."""
        content = b"".join(self.parts)
        digest = hashlib.sha256(content).hexdigest()
        meta = TokensMeta(self.stamp.dtype.name, self.n_tokens, self.n_bytes, digest)
        header = Header(self.stamp, meta, read)
        header = replace(header, sha256=header.digest())
        path = shard_path(self.folder, self.name, len(self.written))
        start = MAGIC + json.dumps(asdict(header)).encode()
        write_atomically(path, start.ljust(HEADER_BYTES - 1) + b"\n" + content)
        self.written.append(digest)
        self.n_tokens = self.n_bytes = 0
        self.parts.clear()


def shard_path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:05d}.bin"


def read_header(path: Path, stamp: Stamp) -> Header:
    """The header of a shard; raises `DamagedFileError` unless it matches `stamp` and its file."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}.") from None
    if not start.startswith(MAGIC):
        raise DamagedFileError(f"{path} is from elsewhere: it does not begin as a token shard.")
    try:
        header = TypeAdapter(Header).validate_json(start[len(MAGIC) :], strict=True)
    except ValidationError as error:
        what = problems(error)
        raise DamagedFileError(f"{path} is truncated or has no valid header: {what}.") from None
    if header.sha256 not in ("", header.digest()):
        raise DamagedFileError(f"{path} is damaged: its header is not as it was written.")
    check_tokenizer(path, header, stamp)
    expected = HEADER_BYTES + header.tokens.tokens * stamp.dtype.itemsize
    if size != expected:
        raise DamagedFileError(
            f"{path} is truncated or from elsewhere: it has {size} bytes and not {expected}."
        )
    return header


def check_tokenizer(path: Path, header: Header, stamp: Stamp) -> None:
    """Refuses tokens of another tokenizer or another type than those of `stamp`."""
    made, dtype = header.tokenizer, header.tokens.dtype
    if made.sha256 != stamp.sha256:
        raise DamagedFileError(
            f"{path} is from elsewhere: its tokens are of the tokenizer {made.name} "
            f"({made.sha256[:8]}) and not of {stamp.name} ({stamp.sha256[:8]})."
        )
    if dtype != stamp.dtype.name:
        raise DamagedFileError(
            f"{path} is from elsewhere: its tokens are {dtype}, and those of a vocabulary of "
            f"{stamp.vocab_size} are {stamp.dtype.name}."
        )


@dataclass(frozen=True)
class Shard:
    """The tokens of a shard, mapped when they are read, so that few files are open at a time."""

    path: Path
    dtype: np.dtype
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, index: slice) -> np.ndarray:
        return mapped(self)[index]


@functools.lru_cache(maxsize=OPEN)
def mapped(shard: Shard) -> np.ndarray:
    """A map of the tokens; the files of the last ones that were asked for stay open."""
    return np.memmap(shard.path, shard.dtype, "r", HEADER_BYTES, (shard.tokens,))


def checked(shard: Shard, meta: TokensMeta, vocab_size: int) -> None:
    """Reads all tokens of a shard; raises `DamagedFileError` if they are not as written."""
    ids = np.memmap(shard.path, shard.dtype, "r", HEADER_BYTES, (shard.tokens,))
    if ids.max(initial=0) >= vocab_size:
        raise DamagedFileError(
            f"{shard.path} is damaged: it has the token {ids.max()}, and its vocabulary ends "
            f"before {vocab_size}."
        )
    if hashlib.sha256(ids.data).hexdigest() != meta.sha256:
        raise DamagedFileError(f"{shard.path} is damaged: its tokens are not those of its header.")


def open_shards(expected: dict[Path, str], stamp: Stamp, verify: bool) -> Tokens:
    """The shards of a text, given with the hashes of their tokens, and mapped when they are read.

    Headers and sizes are always checked. The tokens are read and hashed if their total size is at
    most HASHED_BYTES, or if `verify` is true. A file that has changed raises `DamagedFileError`
    with its name.
    """
    metas = {path: read_header(path, stamp).tokens for path in expected}
    for path, meta in metas.items():
        if meta.sha256 != expected[path]:
            raise DamagedFileError(f"{path} is from elsewhere: it holds the tokens of other text.")
    n_tokens = sum(meta.tokens for meta in metas.values())
    hashed = verify or n_tokens * stamp.dtype.itemsize <= HASHED_BYTES
    parts = [Shard(path, stamp.dtype, meta.tokens) for path, meta in metas.items()]
    for shard, meta in zip(parts, metas.values(), strict=True) if hashed else ():
        checked(shard, meta, stamp.vocab_size)
    digest = hashlib.sha256("".join(expected.values()).encode()).hexdigest()
    n_bytes = sum(meta.bytes for meta in metas.values())
    if (n_tokens and n_bytes < 1) or min(
        min(meta.bytes, meta.tokens) for meta in metas.values()
    ) < 0:
        raise DamagedFileError(
            f"{next(iter(expected))} is damaged: it or one after it counts no bytes of text."
        )
    return Tokens(Joined(parts), TokensMeta(stamp.dtype.name, n_tokens, n_bytes, digest))
