"""A folder of a tokenized text: its tokenizer, shards of tokens, and an index of them.

`index.json` is written after each pair of shards, one of training and one of validation text, so
that who continues an interrupted text knows how many documents are on the disk. It says when the
text is complete, and no other text is read.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter
from tokenizers import Tokenizer

from examples.trainer.data import token_files, tokenizer
from examples.trainer.data.token_files import TokenFile, Tokens, joined
from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

INDEX = "index.json"
PARTS = "parts.json"  # of a folder with a part for each file
FORMAT = 4  # increase it when the same text and settings would give other files
SHARD_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted download loses
HASHED_BYTES = 2**28  # of larger splits only the sizes of files are compared
Name = Annotated[str, Field(pattern=r"^[\w.-]*[\w-][\w.-]*$")]
"""Of a file or folder in a folder, which leads nowhere else."""


@dataclass(frozen=True)
class Dataset:
    """The text of a run, as tokens."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Identifies the content: equal keys mean equal tokens."""


@dataclass(frozen=True)
class Shard:
    """A file of tokens in a folder."""

    name: Name
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
        self.n_tokens += len(ids) if split == "train" else 0

    def flush(self, *splits: str) -> None:
        """Writes what waits of each split as a shard, and then the index that has them."""
        for split in filter(self.size.get, splits):
            content, shards = b"".join(self.waiting[split]), getattr(self.index, split)
            name = f"{split}-{len(shards):05d}.bin"
            token_files.write(self.folder / name, content, self.dtype)
            digest = hashlib.sha256(content).hexdigest()
            shards.append(Shard(name, self.size[split], self.bytes[split], digest))
            self.waiting[split].clear()
            self.size[split] = self.bytes[split] = 0
        self.index.read = self.read
        content = json.dumps({"format": FORMAT, "index": asdict(self.index)}, indent=1)
        write_atomically(self.folder / INDEX, content.encode())

    def finish(self) -> None:
        """Writes the rest, and that the text is complete."""
        self.index.complete = True
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


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    files.check_regular(path)
    try:
        written = json.loads(path.read_bytes())
        if written["format"] != FORMAT:
            raise ValueError(f"it has the format {written['format']}, and not {FORMAT}")
        return TypeAdapter(Index).validate_python(written["index"])
    except FileNotFoundError:
        what = "there is none, as the folder is not complete. Prepare it again"
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        what = str(error)  # pydantic's is a ValueError
    raise DamagedFileError(f"{path} does not fit its folder: {what}.")


def is_complete(folder: Path) -> bool:
    """Whether `Writer.finish` has run here; `open_folders` reports an index that is damaged."""
    if not (folder / INDEX).exists():
        return False
    try:
        return read_index(folder).complete
    except DamagedFileError:
        return True


def open_shard(folder: Path, shard: Shard) -> TokenFile:
    """A file of tokens; raises `DamagedFileError` if it is not the one of the index."""
    found = token_files.open_file(folder / shard.name)
    if len(found) != shard.tokens:
        raise DamagedFileError(f"{found.path} is not as written: it has not {shard.tokens} tokens.")
    return found


def open_folder(folder: Path) -> Dataset:
    """Opens a complete text; raises `DamagedFileError` that names a file that has changed."""
    return open_folders(folder, [folder])


def open_parts(folder: Path) -> Dataset:
    """Opens a text that has a part for each of its files."""
    path = folder / PARTS
    files.check_regular(path)
    try:
        names = TypeAdapter(list[Name]).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {PARTS}: `python -m examples.data prepare --out {folder} ...` writes "
            "it when all files are tokenized."
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} names no parts: {error}.") from None
    if len({*names}) < len(names):
        raise DamagedFileError(f"{path} names a part twice: prepare the text again.")
    return open_folders(folder, [folder / "parts" / name for name in names])


def open_folders(folder: Path, parts: list[Path]) -> Dataset:
    """The text of folders that have the tokenizer of `folder`, one after the other."""
    loaded, digest = load_tokenizer(folder)
    indices = {part: read_index(part) for part in parts}
    for part, index in indices.items():
        if not index.complete:
            raise DamagedFileError(f"{part} is not complete: prepare it to its end before.")
        if index.tokenizer_sha256 != digest:
            raise DamagedFileError(f"{folder / 'tokenizer.json'} is not that of the tokens.")
    splits = {
        split: [(part, shard) for part, index in indices.items() for shard in getattr(index, split)]
        for split in ("train", "val")
    }
    check_apart(*([shard.sha256 for _, shard in shards] for shards in splits.values()), folder)
    train, val = (
        open_split(folder, split, shards, loaded.get_vocab_size())
        for split, shards in splits.items()
    )
    content = f"{digest} {train.meta.sha256} {val.meta.sha256}"
    return Dataset(loaded, train, val, hashlib.sha256(content.encode()).hexdigest()[:16])


def check_apart(train: Sequence[str], val: Sequence[str], where: object) -> None:
    """Refuses a file of validation text that is one of the training text; given their hashes."""
    if {*train} & {*val}:
        raise UserError(
            f"a file of validation text in {where} is equal to one of training text, so that the"
            " loss would be that of text that was trained on: give other validation text."
        )


def open_split(
    folder: Path, split: str, shards: Sequence[tuple[Path, Shard]], words: int
) -> Tokens:
    """A split of the text. Unless it is large, all tokens are read and hashed."""
    n_bytes = sum(shard.bytes for _, shard in shards)
    if n_bytes < 1:
        raise UserError(
            f"{folder} has no {split} text, as it had too few documents to hold one out:"
            " prepare more of them, or with another --val-fraction."
        )
    found = [open_shard(part, shard) for part, shard in shards]
    if sum(len(file) * file.dtype.itemsize for file in found) <= HASHED_BYTES:
        for file, (_, shard) in zip(found, shards, strict=True):
            ids = file[:]
            token_files.check_ids(file.path, ids, words)
            if hashlib.sha256(ids.data).hexdigest() != shard.sha256:
                raise DamagedFileError(f"{file.path} is damaged: its tokens are not as written.")
    return joined(found, n_bytes, [shard.sha256 for _, shard in shards])
