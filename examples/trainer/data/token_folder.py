"""A folder of a tokenized text: its tokenizer, shards of tokens, and an index of them.

`index.json` is written after each pair of shards, one of training and one of validation text, so
that who continues an interrupted text knows how many documents are on the disk. It says when the
text is complete.
"""

import contextlib
import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from examples.trainer.data import token_files, tokenizer
from examples.trainer.data.token_files import Tokens, joined
from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

INDEX = "index.json"
PARTS = "parts.json"  # of a folder with a part for each file
FORMAT = 3  # increase it when the same text and settings would give other files
SHARD_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted download loses


@dataclass(frozen=True)
class Part:
    """One text of a mixture."""

    name: str
    """As it was given."""
    rows: int
    """How many rows of a block of a mixture are from it."""
    train: Tokens
    val: Tokens


@dataclass(frozen=True)
class Dataset:
    """The text of a run, as tokens."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Identifies the content: equal keys mean equal tokens."""
    parts: tuple[Part, ...] = ()
    """The texts of a mixture, of which `train` and `val` have all tokens."""
    lost: float | None = 0.0
    """The share of the validation text that its tokens do not give back; None: not known."""


@dataclass(frozen=True)
class Shard:
    """A file of tokens in a folder."""

    name: str
    tokens: int
    bytes: int
    """Size in UTF-8 of the text that the tokens stand for."""
    sha256: str
    """Hash of the tokens."""


@dataclass
class Index:
    """What `index.json` holds."""

    tokenizer_sha256: str
    train: list[Shard] = field(default_factory=list)
    val: list[Shard] = field(default_factory=list)
    read: int = 0
    """Documents of the source that are in the shards."""
    lost: float | None = None
    """As in `Dataset`."""
    complete: bool = False
    source: str = ""
    """When the file of a part was last written, and how it was read."""


class Writer:
    """Tokenizes documents into a folder; goes on after the shards that its index has."""

    def __init__(self, folder: Path, words: Path | None = None, source: str = ""):
        """Reads the tokenizer in the folder `words`, by default that of the tokens."""
        self.folder = folder
        self.encoder, digest = load_tokenizer(words or folder)
        self.dtype = token_files.dtype_of(self.encoder.get_vocab_size())
        self.back = tokenizer.RoundTrip(self.encoder)
        self.waiting: dict[str, list[bytes]] = {"train": [], "val": []}
        self.size, self.bytes = dict.fromkeys(self.waiting, 0), dict.fromkeys(self.waiting, 0)
        self.index = Index(digest, source=source)
        if (folder / INDEX).exists():
            self.index = read_index(folder)
        if self.index.complete:
            raise UserError(f"{folder} has been completed by another process: start again.")
        self.read = self.index.read
        for shard in (*self.index.train, *self.index.val):
            open_shard(folder, shard)
        self.n_tokens = sum(shard.tokens for shard in self.index.train)
        """Tokens of training text, those that wait included."""

    def fill(
        self,
        texts: Iterable[str],
        split_of: Callable[[str], str],
        limit: float = math.inf,
        say: Callable[[str], None] | None = None,
    ) -> bool:
        """Adds documents until there are `limit` training tokens; whether there are so many.

        A split is written when it has a shard. With `say`, which hears how far it is, both are
        written then, so that whoever continues knows how many documents are on the disk.
        """
        for text, ids in tokenizer.encode(self.encoder, texts):
            split = split_of(text)
            self.add(split, text, ids)
            enough = self.n_tokens >= limit
            if enough or self.size[split] >= SHARD_TOKENS:
                self.flush(*(self.waiting if say else [split]))
                if say:
                    say(f"  {self.n_tokens:,} tokens")
            if enough:
                return True
        return False

    def add(self, split: str, text: str, ids: list[int]) -> None:
        self.waiting[split].append(np.asarray(ids, self.dtype).tobytes())
        self.size[split] += len(ids)
        self.bytes[split] += len(text.encode())
        self.read += 1
        if split == "train":
            self.n_tokens += len(ids)
        else:
            self.back.add(text, ids)

    def flush(self, *splits: str) -> None:
        """Writes what waits of each split as a shard, and then the index that has them."""
        for split in splits:
            if not self.size[split]:
                continue
            content, shards = b"".join(self.waiting[split]), getattr(self.index, split)
            name = f"{split}-{len(shards):05d}.bin"
            token_files.write(self.folder / name, content, self.dtype)
            digest = hashlib.sha256(content).hexdigest()
            shards.append(Shard(name, self.size[split], self.bytes[split], digest))
            self.waiting[split].clear()
            self.size[split] = self.bytes[split] = 0
        self.index.read = self.read
        index = asdict(self.index)
        content = json.dumps({"sha256": digest_of(index), "index": index}, indent=1)
        write_atomically(self.folder / INDEX, content.encode())

    def finish(self) -> None:
        """Writes the rest, and that the text is complete."""
        self.index.complete, self.index.lost = True, self.back.share
        self.flush(*self.waiting)


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule says to ignore a relative path.
    root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return root / "optax_muonplus"


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Creates a folder to write in; if that fails, the error says what to do."""
    advice = "Or set XDG_CACHE_HOME to a folder that can be written."
    with files.explained(f"the cache {folder}", "write", advice):
        folder.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def writing_alone(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """The same for one process at a time; one that has waited looks again what there is to do."""
    with writing(folder):
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"waiting for another process, which writes {folder} ...")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def named_tokenizer(name: str, end: str = "") -> Tokenizer:
    """A tokenizer from the hub or a file; downloads are kept in the cache."""
    kept = cache_folder() / "tokenizers"
    with writing(kept):
        return tokenizer.named(name, kept, end)


def keep_tokenizer(folder: Path, made: Tokenizer) -> None:
    """Writes the tokenizer, which must come before the shards."""
    write_atomically(folder / "tokenizer.json", made.to_str().encode())


def load_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """The tokenizer that `keep_tokenizer` wrote, and the hash of its file."""
    path = folder / "tokenizer.json"
    loaded = tokenizer.load(path)
    return loaded, hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of(index: object) -> str:
    return hashlib.sha256(f"{FORMAT} {json.dumps(index)}".encode()).hexdigest()


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        written = json.loads(path.read_bytes())
        if digest_of(written["index"]) != written["sha256"]:
            raise ValueError("it is not as it was written, or of another version")
        return TypeAdapter(Index).validate_python(written["index"])
    except FileNotFoundError:
        what = "there is none, as the folder is not complete, or of version 0.2.0. Prepare it again"
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        what = str(error)  # ValidationError is a ValueError
    raise DamagedFileError(f"{path} does not fit its folder: {what}.")


def is_complete(folder: Path) -> bool:
    """Whether `Writer.finish` has run here; `open_folders` reports an index that is damaged."""
    if not (folder / INDEX).exists():
        return False
    try:
        return read_index(folder).complete
    except DamagedFileError:
        return True


def open_shard(folder: Path, shard: Shard) -> token_files.TokenFile:
    """A file of tokens; raises `DamagedFileError` if it is not the one of the index."""
    path = folder / Path(shard.name).name
    found = token_files.open_file(path)
    if len(found) != shard.tokens:
        raise DamagedFileError(f"{path} is from elsewhere: it does not have {shard.tokens} tokens.")
    return found


def open_folder(folder: Path, verify: bool) -> Dataset:
    """Opens a complete text; raises `DamagedFileError` that names a file that has changed."""
    return open_folders(folder, [folder], verify)


def open_parts(folder: Path, verify: bool) -> Dataset:
    """Opens a text that has a part for each of its files."""
    path = folder / PARTS
    try:
        names = TypeAdapter(list[str]).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {PARTS}: `python -m examples.data prepare --out {folder} ...` writes "
            "it when all files are tokenized."
        ) from None
    except (OSError, ValidationError) as error:
        raise DamagedFileError(f"{path} names no parts: {error}.") from None
    return open_folders(folder, [folder / "parts" / Path(name).name for name in names], verify)


def open_folders(folder: Path, parts: list[Path], verify: bool) -> Dataset:
    """The text of folders that have the tokenizer of `folder`, one after the other."""
    loaded, digest = load_tokenizer(folder)
    indices = {part: read_index(part) for part in parts}
    if any(index.tokenizer_sha256 != digest for index in indices.values()):
        raise DamagedFileError(f"{folder / 'tokenizer.json'} is truncated or from elsewhere.")
    train, val = (
        open_split(folder, indices, split, loaded.get_vocab_size(), verify)
        for split in ("train", "val")
    )
    content = f"{digest} {train.meta.sha256} {val.meta.sha256}"
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = [x.lost for x in indices.values() if x.lost is not None and x.val]
    return Dataset(loaded, train, val, key, lost=statistics.fmean(known) if known else None)


def open_split(
    folder: Path, indices: dict[Path, Index], split: str, words: int, verify: bool
) -> Tokens:
    """A split of the text. If it is small or `verify` is true, all tokens are read and hashed."""
    shards = [(part, shard) for part, index in indices.items() for shard in getattr(index, split)]
    if not shards:
        raise UserError(
            f"{folder} has no {split} text, as it had too few documents to hold one out:"
            " prepare more of them, or with another --val-fraction."
        )
    found = [open_shard(part, shard) for part, shard in shards]
    n_bytes = sum(shard.bytes for _, shard in shards)
    if n_bytes < 1:
        raise DamagedFileError(f"{shards[0][0] / INDEX} counts no bytes of {split} text.")
    size = sum(len(file) * file.dtype.itemsize for file in found)
    for file, (_, shard) in zip(found, shards, strict=True):
        if verify or size <= token_files.HASHED_BYTES:
            token_files.check_ids(file, words)
            if hashlib.sha256(file[:].data).hexdigest() != shard.sha256:
                raise DamagedFileError(f"{file.path} is damaged: its tokens are not as written.")
    return joined(found, n_bytes, [shard.sha256 for _, shard in shards])
