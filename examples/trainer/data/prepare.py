"""Turns a text into a tokenizer and token shards once; later runs find them in the cache."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from examples.trainer.data import bin_files, cache, corpus, hub, sources, tokenizer
from examples.trainer.data.cache import Dataset, cache_folder
from examples.trainer.data.shards import Writer
from examples.trainer.data.tokenizer import RoundTrip
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError

TRAINED = "trained"  # the name of a tokenizer that was trained on its text


def prepare(config: DataConfig, say: Callable[[str], None], stream: bool = True) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there.

    Without `stream`, a text of the hub that is not in the cache is an error.
    """
    check_one_text(config)
    if config.mixture:
        return prepare_mixture(config, say, stream)
    if config.hub or config.source == "fineweb":
        return hub.prepare(config, cache_folder(), say, stream)
    if config.source == "prepared":
        if len(config.paths) != 1:
            raise UserError("--data.source prepared: give the one folder as --data.paths FOLDER.")
        return cache.open_parts(Path(config.paths[0]), config.verify)
    if config.source == "bin":
        kept = cache_folder() / "tokenizers"
        with cache.writing(kept):
            return bin_files.prepare(config, tokenizer.named(config.tokenizer or "gpt2", kept))
    documents = corpus.read(config)
    given = None
    if config.tokenizer:
        kept = cache_folder() / "tokenizers"
        with cache.writing(kept):
            given = tokenizer.named(config.tokenizer, kept)
    folder = cache_folder() / cache_key(config, documents, given)
    if cache.is_complete(folder):
        try:
            found = cache.open_dataset(folder, config.verify)
            if found.lost is not None:
                return found
        except DamagedFileError as error:
            say(f"{error} Making it again.")
    with cache.writing(folder):
        fill(folder, config, documents, given, say)
    return cache.open_dataset(folder, config.verify)


def prepare_mixture(config: DataConfig, say: Callable[[str], None], stream: bool) -> Dataset:
    """The tokens of all texts of a mixture."""
    rows = sources.rows_of(config.mixture)
    settings = {name: sources.settings_of(name, config) for name in rows}  # refused before any work
    texts = {name: prepare(each, say, stream) for name, each in settings.items()}
    return sources.mixed({name: (rows[name], text) for name, text in texts.items()})


def check_one_text(config: DataConfig) -> None:
    """Refuses settings that name several texts outside of a mixture."""
    given = {"hub": config.hub, "mixture": config.mixture, "paths": config.paths}
    named = [f"--data.{name}" for name, value in given.items() if value]
    if config.source == "fineweb" and named == ["--data.paths"]:
        named.insert(0, "--data.source fineweb")
    if len(named) > 1:
        raise UserError(f"{named[0]} reads no {named[1]}: give one of them.")
    if config.mixture and config.order == "numpy":
        raise UserError("--data.order numpy has no mixtures: leave it out, or give feistel-1.")


def cache_key(config: DataConfig, documents: list[str], given: Tokenizer | None) -> str:
    """The name of the folder that `fill` would write."""
    made_by = corpus.digest(given.to_str()) if given else config.vocab_size
    hasher = hashlib.sha256(f"{cache.FORMAT} {made_by} {config.val_fraction}".encode())
    for document in documents:
        hasher.update(corpus.digest(document).encode())
    return hasher.hexdigest()[:16]


def fill(
    folder: Path,
    config: DataConfig,
    documents: list[str],
    given: Tokenizer | None,
    say: Callable[[str], None],
) -> None:
    """Trains a tokenizer if none is given, and writes all files of a cache folder."""
    start = time.monotonic()
    train, val = corpus.split(documents, config.val_fraction)
    size = sum(len(document.encode()) for document in documents)
    say(f"tokenizing {size / 1e6:.1f} MB of text, which is done once ...")
    cache.keep_tokenizer(folder, given or tokenizer.train(train, config.vocab_size))
    name = Path(config.tokenizer).name[:80] if given else TRAINED
    encoder, stamp = cache.load_tokenizer(folder, name)
    writers = Writer(folder, "train", stamp), Writer(folder, "val", stamp)
    back = RoundTrip(encoder)
    for writer, texts in zip(writers, (train, val), strict=True):
        for read, (text, ids) in enumerate(tokenizer.encode(encoder, texts), 1):
            writer.add(ids, len(text.encode()))
            if texts is val:
                back.add(text, ids)
            if writer.is_full or read == len(texts):
                writer.flush(read)
    cache.finish(folder, stamp, *writers, back.share)
    say(f"tokenized in {time.monotonic() - start:.0f} s, kept in {folder}")
