"""Turns a text into tokens once; later runs find them in the cache.

A folder of the cache has the tokenizer, `train.bin` and `val.bin` as nanoGPT writes them, and
`index.json`. That says how many documents are on the disk, so that an interrupted stream goes on,
and at the end that the text is complete, with a hash of each file.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
SPLITS = ("train", "val")
SAVED_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted stream loses
HASHED_BYTES = 2**28  # of a larger file only the size is compared
REMEDY = "A folder of the cache is made again after it was deleted."
# 100 billion GPT-2 tokens: more than the paper's longest runs, 72 billion.
FINEWEB = ("HuggingFaceFW/fineweb", "sample-100BT", "train")


def prepare(config: DataConfig, say: Say) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there."""
    if config.source == "bin":
        # Files that are missing are named before a tokenizer is fetched.
        named = [token_files.bin_of(config.paths, split) for split in SPLITS]
        words = tokenizer.named(config.tokenizer or "gpt2", config.end_token)
        return token_files.read_bins(*named, words)
    if config.source == "fineweb":
        return prepare_fineweb(config, say)
    return prepare_files(config, say)


def prepare_files(config: DataConfig, say: Say) -> Dataset:
    """The text of files, which is tokenized again if its folder is damaged or incomplete."""
    documents = corpus.read(config, say)
    given = tokenizer.named(config.tokenizer, config.end_token) if config.tokenizer else None
    made_by = given.to_str() if given else config.vocab_size
    content = "\0".join([f"{made_by} {config.val_fraction}", *documents])
    folder = cache_folder() / f"tokens-{hash_of(content.encode())[:16]}"
    with writing(folder, say):
        try:
            if (index := read_index(folder)) and index["complete"]:
                return open_folder(folder, index)
        except (DamagedFileError, OSError) as error:
            say(f"{error} This one is made again now.")
        train, val = corpus.split(documents, config.val_fraction)
        size = sum(len(document.encode()) for document in documents)
        say(f"tokenizing {size:,} bytes of text, once, into {folder} ...")
        made = given or tokenizer.ready(tokenizer.train(train, config.vocab_size), config.end_token)
        index = new_index(folder, made)
        held_out = set(val)
        return fill(
            folder, index, [*train, *val], lambda x: "val" if x in held_out else "train", say
        )


def prepare_fineweb(config: DataConfig, say: Say) -> Dataset:
    """The first `config.tokens` tokens; an interrupted stream is continued."""
    if config.paths:
        raise UserError("--data.source fineweb: give no --data.paths.")
    name, limit = config.tokenizer or "gpt2", int(config.tokens)
    # The hub is not asked where the cache has the text.
    words = name if name in tokenizer.HUB else tokenizer.named(name).to_str()
    key = (FINEWEB, words, config.end_token, config.val_fraction, limit)
    folder = cache_folder() / f"fineweb-tokens-{hash_of(repr(key).encode())[:16]}"
    with writing(folder, say):
        index = read_index(folder)
        if index and index["complete"]:
            return open_folder(folder, index)
        index = index or new_index(folder, tokenizer.named(name, config.end_token))
        done = index["train"]["tokens"]
        say(f"streaming FineWeb, {done:,} to {limit:,} tokens, once, into {folder} ...")
        return fill(
            folder,
            index,
            stream(index["read"]),
            lambda text: corpus.split_of(text, config.val_fraction),
            say,
            limit,
        )


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
            " continues from the last tokens on the disk; without a network, train on files"
            " (--data.paths)."
        ) from None


Index = dict[str, Any]
"""What `index.json` holds: the hash of the tokenizer, how many documents were read, whether that is
all, and of each split its tokens, the bytes of their text and, at the end, their hash."""


def new_index(folder: Path, words: Tokenizer) -> Index:
    """That of an empty folder, into which it writes the tokenizer."""
    content = words.to_str().encode()
    (folder / INDEX).unlink(missing_ok=True)
    files.write_atomically(folder / TOKENIZER, content)
    splits = {name: {"tokens": 0, "bytes": 0, "sha256": ""} for name in SPLITS}
    return {"tokenizer": hash_of(content), "read": 0, "complete": False, **splits}


def fill(
    folder: Path,
    index: Index,
    texts: Iterable[str],
    split_of: Callable[[str], str],
    say: Say,
    limit: float = math.inf,
) -> Dataset:
    """Adds documents until there are `limit` training tokens, and then says that they are all."""
    words = open_tokenizer(folder, index)
    dtype = token_files.dtype_of(words)
    with contextlib.ExitStack() as stack:
        outputs = {name: stack.enter_context(end_of(folder, name, index, dtype)) for name in SPLITS}
        unsaved = 0
        for text, ids in tokenizer.encode(words, texts):
            if index["train"]["tokens"] >= limit:
                break
            name = split_of(text)
            outputs[name].write(np.asarray(ids, dtype).tobytes())
            index["read"] += 1
            index[name]["tokens"] += len(ids)
            index[name]["bytes"] += len(text.encode())
            unsaved += len(ids)
            if unsaved >= SAVED_TOKENS:
                save(folder, index, outputs.values(), say)
                unsaved = 0
        save(folder, index, outputs.values(), say)
    for name in SPLITS:
        with (folder / f"{name}.bin").open("rb") as file:
            index[name]["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    index["complete"] = True
    write_index(folder, index)
    return open_folder(folder, index)


def end_of(folder: Path, name: str, index: Index, dtype: np.dtype) -> BinaryIO:
    """The file of a split, open behind the tokens that the index has; what follows is cut off."""
    path, size = folder / f"{name}.bin", index[name]["tokens"] * dtype.itemsize
    files.check_regular(path)
    if size and (not path.exists() or path.stat().st_size < size):
        raise DamagedFileError(f"{path} is not as written. {REMEDY}")
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def save(folder: Path, index: Index, outputs: Iterable[Any], say: Say) -> None:
    """Writes what waits of both files, and then the index that has it."""
    for file in outputs:
        file.flush()
        os.fsync(file.fileno())
    write_index(folder, index)
    say(f"  {index['train']['tokens']:,} training tokens")


def write_index(folder: Path, index: Index) -> None:
    content = json.dumps({**index, "sha256": digest_of(index)}, indent=1)
    files.write_atomically(folder / INDEX, content.encode())


def hash_of(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def read_index(folder: Path) -> Index | None:
    path = folder / INDEX
    files.check_regular(path)
    try:
        found = json.loads(path.read_bytes())
        check(path, found.pop("sha256") == digest_of(found))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFileError(f"{path} is no index ({error}). {REMEDY}") from None
    return found


def digest_of(index: Index) -> str:
    return hash_of(json.dumps(index, sort_keys=True).encode())


def open_folder(folder: Path, index: Index) -> Dataset:
    """The text of a folder that is complete."""
    words = open_tokenizer(folder, index)
    dtype = token_files.dtype_of(words)
    train, val = (open_split(folder / f"{name}.bin", index[name], dtype) for name in SPLITS)
    return token_files.dataset(words, index["tokenizer"], train, val)


def open_tokenizer(folder: Path, index: Index) -> Tokenizer:
    path = folder / TOKENIZER
    files.check_regular(path)
    check(path, hash_of(path.read_bytes()) == index["tokenizer"])
    return tokenizer.load(path)


def open_split(path: Path, known: dict[str, Any], dtype: np.dtype) -> Tokens:
    """A split of the text. Unless it is large, all tokens are read and hashed."""
    ids = token_files.open_file(path, dtype)
    check(path, len(ids) == known["tokens"])
    if len(ids) * dtype.itemsize <= HASHED_BYTES:
        check(path, hash_of(ids[:].data) == known["sha256"])
    return token_files.tokens(ids, known["bytes"], known["sha256"])


def check(path: Path, is_as_written: bool) -> None:
    if not is_as_written:
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
