"""Text to a tokenizer and token files, once; later runs find them in the cache."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from examples.config import DataConfig
from examples.data import corpus, tokenizer
from examples.data.loader import Tokens, TokensMeta, open_tokens, write_tokens
from examples.errors import DamagedFileError, UserError
from examples.files import write_atomically

FORMAT = 1  # raise it when the same text and settings would give other files


@dataclass(frozen=True)
class Dataset:
    """What a run needs to know about its text."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Names the content: equal keys mean equal tokens."""


def cache_folder() -> Path:
    """The folder for what can be computed again, by the XDG rule."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule says that a relative path is to be ignored.
    root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return root / "optax_muonplus"


def prepare(config: DataConfig, say: Callable[[str], None]) -> Dataset:
    """The tokens of the configured text, from the cache if they are there and whole."""
    documents = corpus.read(config)
    key = cache_key(config, documents)
    folder = cache_folder() / key
    if (folder / "meta.json").exists():  # the last file that `fill` writes
        try:
            return open_dataset(folder, key)
        except DamagedFileError as error:
            say(f"{error} Making it again.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fill(folder, config, documents, say)
    except OSError as error:
        raise UserError(
            f"cannot write the cache {folder}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from None
    return open_dataset(folder, key)


def cache_key(config: DataConfig, documents: list[str]) -> str:
    """Names the tokens that `fill` would make."""
    hasher = hashlib.sha256(f"{FORMAT} {config.vocab_size} {config.val_fraction}".encode())
    for document in documents:
        hasher.update(corpus.digest(document).encode())
    return hasher.hexdigest()[:16]


def fill(
    folder: Path, config: DataConfig, documents: list[str], say: Callable[[str], None]
) -> None:
    """Trains the tokenizer and writes all files of a cache folder."""
    start = time.monotonic()
    train, val = corpus.split(documents, config.val_fraction)
    sizes = {"train": n_bytes(train), "val": n_bytes(val)}
    say(f"tokenizing {sum(sizes.values()) / 1e6:.1f} MB of text, which is done once ...")
    path = folder / "tokenizer.json"
    write_atomically(path, tokenizer.train(train, config.vocab_size).to_str().encode())
    encoder = tokenizer.load(path)
    meta: dict[str, object] = {"tokenizer": file_digest(path)}
    for name, texts in (("train", train), ("val", val)):
        ids = tokenizer.encode(encoder, texts)
        vocab_size = encoder.get_vocab_size()
        meta[name] = asdict(write_tokens(folder / f"{name}.bin", ids, sizes[name], vocab_size))
    write_atomically(folder / "meta.json", json.dumps(meta, indent=2).encode())
    say(f"tokenized in {time.monotonic() - start:.0f} s, kept in {folder}")


def open_dataset(folder: Path, key: str) -> Dataset:
    """What `fill` wrote; raises `DamagedFileError` naming a file that is not."""
    path = folder / "tokenizer.json"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        train, val = TokensMeta(**meta["train"]), TokensMeta(**meta["val"])
        whole = file_digest(path) == meta["tokenizer"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedFileError(f"{folder}/meta.json does not fit its folder: {error!r}.") from None
    if not whole:
        raise DamagedFileError(f"{path} is truncated or from elsewhere.")
    return Dataset(
        tokenizer.load(path),
        open_tokens(folder / "train.bin", train),
        open_tokens(folder / "val.bin", val),
        key,
    )


def n_bytes(documents: list[str]) -> int:
    """The size of the documents in UTF-8."""
    return sum(len(document.encode()) for document in documents)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
