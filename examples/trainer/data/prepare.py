"""Turns a text into tokens once; later runs find them in the cache.

A folder of the cache has the tokenizer, `.bin` files of both splits, and `index.json`, which is
written after each pair of files, so that who continues an interrupted stream knows how many
documents are on the disk. It says when the text is complete, and no other text is read.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from examples.trainer.data import corpus, token_files, tokenizer
from examples.trainer.data.token_files import Dataset, Tokens
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError, UserError, load_package

Say = Callable[[str], None]
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted stream loses
HASHED_BYTES = 2**28  # of larger splits only the sizes of files are compared
REMEDY = "A folder of the cache is made again after it was deleted."
# 100 billion GPT-2 tokens: more than the paper's longest runs, 72 billion.
FINEWEB = ("HuggingFaceFW/fineweb", "sample-100BT", "train")


def prepare(config: DataConfig, say: Say) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there."""
    if config.source == "bin":
        # Files that are missing are named before a tokenizer is fetched.
        named = {split: token_files.bins(config.paths, split) for split in ("train", "val")}
        words = tokenizer.named(config.tokenizer or "gpt2", config.end_token)
        return token_files.read_bins(named, words)
    if config.source == "fineweb":
        return prepare_fineweb(config, say)
    return prepare_files(config, say)


def prepare_files(config: DataConfig, say: Say) -> Dataset:
    """The text of files, which is tokenized again if its folder is damaged."""
    documents = corpus.read(config, say)
    given = tokenizer.named(config.tokenizer, config.end_token) if config.tokenizer else None
    made_by = given.to_str() if given else config.vocab_size
    content = "\0".join([f"{made_by} {config.val_fraction}", *documents])
    folder = cache_folder() / f"text-{hash_of(content.encode())[:16]}"
    with writing(folder, say):
        try:
            if (index := read_index(folder)) and index.complete:
                return open_folder(folder, index)
        except (DamagedFileError, OSError) as error:
            say(f"{error} This one is made again now.")
        train, val = corpus.split(documents, config.val_fraction)
        size = sum(len(document.encode()) for document in documents)
        say(f"tokenizing {size:,} bytes of text, once, into {folder} ...")
        made = given or tokenizer.ready(tokenizer.train(train, config.vocab_size), config.end_token)
        (folder / INDEX).unlink(missing_ok=True)
        files.write_atomically(folder / TOKENIZER, made.to_str().encode())
        writer = Writer(folder, say)
        writer.fill(train, lambda text: "train")
        writer.fill(val, lambda text: "val")
        return writer.finish()


def prepare_fineweb(config: DataConfig, say: Say) -> Dataset:
    """The first `config.tokens` tokens; an interrupted stream is continued."""
    if config.paths:
        raise UserError("--data.source fineweb: give no --data.paths.")
    name, limit = config.tokenizer or "gpt2", int(config.tokens)
    # The hub is not asked where the cache has the text.
    words = name if name in tokenizer.HUB else tokenizer.named(name).to_str()
    key = (FINEWEB, words, config.end_token, config.val_fraction, limit)
    folder = cache_folder() / f"fineweb-{hash_of(repr(key).encode())[:16]}"
    with writing(folder, say):
        if not (folder / TOKENIZER).exists():
            made = tokenizer.named(name, config.end_token)
            files.write_atomically(folder / TOKENIZER, made.to_str().encode())
        if (index := read_index(folder)) and index.complete:
            return open_folder(folder, index)
        writer = Writer(folder, say)
        say(f"streaming FineWeb, {writer.tokens:,} to {limit:,} tokens, once, into {folder} ...")
        texts = stream(writer.index.read)
        writer.fill(texts, lambda text: corpus.split_of(text, config.val_fraction), limit)
        return writer.finish()


def stream(start: int) -> Iterator[str]:
    """The texts of FineWeb from a document on."""
    datasets = load_package("datasets", "--data.source fineweb", "fineweb")
    name, part, split = FINEWEB
    try:
        rows = datasets.load_dataset(name, name=part, split=split, streaming=True)
        for row in rows.skip(start):
            yield row["text"]
    except Exception as error:  # of the network, of the hub, of the package: no common class
        raise UserError(
            f"cannot get more of FineWeb from the Hugging Face hub: {error}. The same command"
            " continues from the last complete file; without a network, train on files"
            " (--data.paths)."
        ) from None


@dataclass(frozen=True)
class Shard:
    """A file of tokens."""

    sha256: str
    """Hash of the tokens."""
    bytes: int
    """Size in UTF-8 of the text that they stand for."""


@dataclass
class Index:
    """What `index.json` holds."""

    tokenizer: str
    """Hash of `tokenizer.json`."""
    read: int = 0
    """Documents of the source that are in the files."""
    complete: bool = False
    train: list[Shard] = field(default_factory=list)
    val: list[Shard] = field(default_factory=list)

    def shards(self, split: str) -> list[Shard]:
        return self.train if split == "train" else self.val


class Writer:
    """Tokenizes documents into a folder with a tokenizer; goes on after what its index has."""

    def __init__(self, folder: Path, say: Say):
        self.folder, self.say = folder, say
        self.index = read_index(folder) or Index(hash_of((folder / TOKENIZER).read_bytes()))
        self.words = open_tokenizer(folder, self.index)
        self.dtype = token_files.dtype_of(self.words)
        self.tokens = len(open_split(folder, "train", self.index, self.dtype).ids)
        """Tokens of training text, those that wait included."""
        self.waiting: dict[str, list[np.ndarray]] = {"train": [], "val": []}
        self.bytes = {"train": 0, "val": 0}
        """Of the text that waits."""

    def fill(
        self, texts: Iterable[str], split_of: Callable[[str], str], limit: float = math.inf
    ) -> None:
        """Adds documents until there are `limit` training tokens."""
        size = {"train": 0, "val": 0}
        for text, ids in tokenizer.encode(self.words, texts):
            if self.tokens >= limit:
                return
            split = split_of(text)
            self.waiting[split].append(np.asarray(ids, self.dtype))
            self.bytes[split] += len(text.encode())
            self.index.read += 1
            self.tokens += len(ids) if split == "train" else 0
            size[split] += len(ids)
            if size[split] >= SHARD_TOKENS:
                self.flush()
                size = {"train": 0, "val": 0}

    def flush(self) -> None:
        """Writes what waits of each split as a file, and then the index that has them."""
        for split, pieces in self.waiting.items():
            if pieces:
                ids, shards = np.concatenate(pieces), self.index.shards(split)
                token_files.write(self.folder / shard(split, len(shards)), ids)
                shards.append(Shard(hash_of(ids.data), self.bytes[split]))
                pieces.clear()
                self.bytes[split] = 0
        content = json.dumps({"index": asdict(self.index)}, indent=1)
        files.write_atomically(self.folder / INDEX, content.encode())
        self.say(f"  {self.tokens:,} training tokens")

    def finish(self) -> Dataset:
        """Writes the rest, and that the text is complete."""
        self.index.complete = True
        self.flush()
        return open_folder(self.folder, self.index)


def shard(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def hash_of(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def read_index(folder: Path) -> Index | None:
    path = folder / INDEX
    files.check_regular(path)
    try:
        fields = json.loads(path.read_bytes())["index"]
        shards = {split: [Shard(**x) for x in fields[split]] for split in ("train", "val")}
        return Index(**(fields | shards))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFileError(f"{path} is no index ({error}). {REMEDY}") from None


def open_folder(folder: Path, index: Index) -> Dataset:
    """The text of a folder that is complete."""
    words = open_tokenizer(folder, index)
    dtype = token_files.dtype_of(words)
    train, val = (open_split(folder, split, index, dtype) for split in ("train", "val"))
    return token_files.dataset(words, index.tokenizer, train, val)


def open_tokenizer(folder: Path, index: Index) -> Tokenizer:
    path = folder / TOKENIZER
    files.check_regular(path)
    check_hash(path, path.read_bytes(), index.tokenizer)
    return tokenizer.load(path)


def open_split(folder: Path, split: str, index: Index, dtype: np.dtype) -> Tokens:
    """A split of the text. Unless it is large, all tokens are read and hashed."""
    shards = index.shards(split)
    hashes = [x.sha256 for x in shards]
    parts = [token_files.open_file(folder / shard(split, i), dtype) for i in range(len(hashes))]
    if sum(map(len, parts)) * dtype.itemsize <= HASHED_BYTES:
        for part, expected in zip(parts, hashes, strict=True):
            check_hash(part.path, part[:].data, expected)
    return token_files.joined(parts, sum(x.bytes for x in shards), hashes)


def check_hash(path: Path, content: bytes | memoryview, expected: str) -> None:
    if hash_of(content) != expected:
        raise DamagedFileError(f"{path} is not as written. {REMEDY}")


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule says to ignore a relative path.
    root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return root / "optax_muonplus"


@contextlib.contextmanager
def writing(folder: Path, say: Say) -> Generator[None]:
    """Makes a folder of the cache, in which one process writes at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process, which writes {folder} ...")
        held = lock.acquire()
    with held:
        yield
