"""Turns a text into tokens once; later runs find them in the cache."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from examples.trainer.data import bin_files, corpus, fineweb, token_folder, tokenizer
from examples.trainer.data.token_folder import Dataset, Writer, cache_folder
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError


def prepare(config: DataConfig, say: Callable[[str], None], stream: bool = True) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there.

    Without `stream`, FineWeb that is not in the cache is an error.
    """
    found = open_text(config, say, stream)
    if config.end_token and (has := tokenizer.end_of(found.tokenizer)[0]) != config.end_token:
        raise UserError(
            f"--data.end-token {config.end_token}: the tokens of this text were made with {has}:"
            " leave the flag out, or prepare the text again, with --data.tokenizer and this flag."
        )
    return found


def open_text(config: DataConfig, say: Callable[[str], None], stream: bool) -> Dataset:
    """The same, before its token between documents is compared with the one that was asked for."""
    if config.source in ("files", "documentation"):
        return prepare_files(config, say)
    if config.source == "bin":
        words = token_folder.named_tokenizer(config.tokenizer or "gpt2", config.end_token)
        return bin_files.prepare(config, words)
    if config.source == "prepared" and len(config.paths) == 1:
        return token_folder.open_parts(Path(config.paths[0]))
    if config.source == "fineweb" and not config.paths:
        return fineweb.prepare(config, say, stream)
    wanted = "no" if config.source == "fineweb" else "the one folder as"
    raise UserError(f"--data.source {config.source}: give {wanted} --data.paths.")


def prepare_files(config: DataConfig, say: Callable[[str], None]) -> Dataset:
    documents = corpus.read(config, say)
    given = None
    if config.tokenizer:
        given = token_folder.named_tokenizer(config.tokenizer, config.end_token)
    folder = cache_folder() / cache_key(config, documents, given)
    with contextlib.suppress(DamagedFileError):
        if token_folder.is_complete(folder):
            return token_folder.open_folder(folder)
    with token_folder.writing_alone(folder, say):
        if token_folder.is_complete(folder):
            try:
                return token_folder.open_folder(folder)
            except DamagedFileError as error:
                say(f"{error} Making it again.")
        fill(folder, config, documents, given, say)
    return token_folder.open_folder(folder)


def cache_key(config: DataConfig, documents: list[str], given: Tokenizer | None) -> str:
    """The name of the folder that `fill` would write."""
    made_by = corpus.digest(given.to_str()) if given else config.vocab_size
    hasher = hashlib.sha256(f"{token_folder.FORMAT} {made_by} {config.val_fraction}".encode())
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
    (folder / token_folder.INDEX).unlink(missing_ok=True)  # of files that are damaged
    made = given or tokenizer.train(train, config.vocab_size)
    token_folder.keep_tokenizer(folder, made)
    writer = Writer(folder)
    writer.fill(train, lambda text: "train")
    writer.fill(val, lambda text: "val")
    writer.finish()
    say(f"tokenized in {time.monotonic() - start:.0f} s, kept in {folder}")
