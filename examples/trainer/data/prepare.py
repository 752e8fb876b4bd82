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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from examples.trainer.data import corpus, token_files, tokenizer
from examples.trainer.data.token_files import Dataset, Tokens
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError, load_package

Say = Callable[[str], None]
SPLITS = ("train", "val")
SAVED_TOKENS = 2**25  # 64 MiB as uint16: the most that an interrupted stream loses
HASHED_BYTES = 2**28  # of a larger file only the size is compared
# 100 billion GPT-2 tokens: more than the paper's longest runs, 72 billion.
FINEWEB = ("HuggingFaceFW/fineweb", "sample-100BT", "train")


class Text(NamedTuple):
    """A text that is to become tokens."""

    name: str
    """Its folder in the cache, which depends on all that the tokens depend on."""
    documents: Callable[[int], Iterable[str]]
    """The documents from a number on."""
    split_of: Callable[[str], str]
    make_tokenizer: Callable[[], Tokenizer]
    limit: float
    """Training tokens after which the rest is left out."""


def prepare(config: DataConfig, say: Say) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there."""
    if config.source == "bin":
        return token_files.read_bins(config)
    text = fineweb(config) if config.source == "fineweb" else text_of_files(config, say)
    folder = cache_folder() / text.name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # another process may be writing it
        index = read_index(folder) or new_index(folder, text.make_tokenizer())
        if index["complete"]:
            return open_folder(folder, index)
        say(f"tokenizing from document {index['read']:,} on, once, into {folder} ...")
        return fill(folder, index, text, say)


def text_of_files(config: DataConfig, say: Say) -> Text:
    documents = corpus.read(config, say)
    given = tokenizer.named(config.tokenizer, config.end_token) if config.tokenizer else None
    made_by = given.to_str() if given else config.vocab_size
    content = "\0".join([f"{made_by} {config.val_fraction}", *documents])
    train, val = corpus.split(documents, config.val_fraction)
    held_out = set(val)

    def make_tokenizer() -> Tokenizer:
        made = given or tokenizer.train(train, config.vocab_size)
        return tokenizer.ready(made, config.end_token)

    return Text(
        f"tokens-{hash_of(content.encode())[:16]}",
        lambda start: [*train, *val][start:],
        lambda text: "val" if text in held_out else "train",
        make_tokenizer,
        math.inf,
    )


def fineweb(config: DataConfig) -> Text:
    if config.paths:
        raise UserError("--data.source fineweb: give no --data.paths.")
    name, limit = config.tokenizer or "gpt2", int(config.tokens)
    # The hub is not asked where the cache has the text.
    words = name if name in tokenizer.HUB else tokenizer.named(name).to_str()
    key = (FINEWEB, words, config.end_token, config.val_fraction, limit)
    return Text(
        f"fineweb-tokens-{hash_of(repr(key).encode())[:16]}",
        stream,
        lambda text: corpus.split_of(text, config.val_fraction),
        lambda: tokenizer.named(name, config.end_token),
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
    (folder / "index.json").unlink(missing_ok=True)
    files.write_atomically(folder / "tokenizer.json", content)
    splits = {name: {"tokens": 0, "bytes": 0, "sha256": ""} for name in SPLITS}
    return {"tokenizer": hash_of(content), "read": 0, "complete": False, **splits}


def fill(folder: Path, index: Index, text: Text, say: Say) -> Dataset:
    """Adds documents until there are enough training tokens, and then says that they are all."""
    words = open_tokenizer(folder, index)
    dtype = token_files.dtype_of(words)
    with contextlib.ExitStack() as stack:
        outputs = {name: stack.enter_context(end_of(folder, name, index, dtype)) for name in SPLITS}
        saved = index["train"]["tokens"]
        for document, ids in tokenizer.encode(words, text.documents(index["read"])):
            if index["train"]["tokens"] >= text.limit:
                break
            split = index[text.split_of(document)]
            outputs[text.split_of(document)].write(np.asarray(ids, dtype).tobytes())
            index["read"] += 1
            split["tokens"] += len(ids)
            split["bytes"] += len(document.encode())
            if index["train"]["tokens"] >= saved + SAVED_TOKENS:
                save(folder, index, outputs.values(), say)
                saved = index["train"]["tokens"]
        save(folder, index, outputs.values(), say)
    for name in SPLITS:
        index[name]["sha256"] = files.sha256(folder / f"{name}.bin")
    index["complete"] = True
    write_index(folder, index)
    return open_folder(folder, index)


def end_of(folder: Path, name: str, index: Index, dtype: np.dtype) -> BinaryIO:
    """The file of a split, open behind the tokens that the index has; what follows is cut off."""
    path, size = folder / f"{name}.bin", index[name]["tokens"] * dtype.itemsize
    files.check_regular(path)
    path.touch()
    check(path, path.stat().st_size >= size)
    os.truncate(path, size)
    return path.open("ab")


def save(folder: Path, index: Index, outputs: Iterable[Any], say: Say) -> None:
    """Writes what waits of both files, and then the index that has it."""
    for file in outputs:
        file.flush()
        os.fsync(file.fileno())
    write_index(folder, index)
    say(f"  {index['train']['tokens']:,} training tokens")


def write_index(folder: Path, index: Index) -> None:
    files.write_atomically(folder / "index.json", json.dumps(index, indent=1).encode())


def read_index(folder: Path) -> Index | None:
    path = folder / "index.json"
    if not path.exists():
        return None
    found = files.read_json(path)
    check(path, isinstance(found, dict) and found.keys() >= {"tokenizer", "read", *SPLITS})
    return found


def open_folder(folder: Path, index: Index) -> Dataset:
    """The text of a folder that is complete."""
    for name in ("tokenizer.json", "train.bin", "val.bin"):
        check(folder / name, (folder / name).exists())
    words = open_tokenizer(folder, index)
    dtype = token_files.dtype_of(words)
    train, val = (open_split(folder / f"{name}.bin", index[name], dtype) for name in SPLITS)
    return token_files.dataset(words, index["tokenizer"], train, val)


def open_tokenizer(folder: Path, index: Index) -> Tokenizer:
    path = folder / "tokenizer.json"
    check(path, files.sha256(path) == index["tokenizer"])
    return tokenizer.load(path)


def open_split(path: Path, known: dict[str, Any], dtype: np.dtype) -> Tokens:
    """A split of the text. Unless it is large, the whole file is read and hashed."""
    ids = token_files.open_file(path, dtype)
    check(path, len(ids) == known["tokens"])
    if len(ids) * dtype.itemsize <= HASHED_BYTES:
        check(path, files.sha256(path) == known["sha256"])
    return Tokens(ids, known["bytes"], known["sha256"])


def check(path: Path, is_as_written: bool) -> None:
    if not is_as_written:
        raise UserError(f"{path} is not as written: remove its folder, which is then made again.")


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule says to ignore a relative path.
    root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return root / "optax_muonplus"
