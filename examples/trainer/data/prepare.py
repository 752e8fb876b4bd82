"""Turns a text into tokens once; later runs find them in the cache.

Many files may be prepared in a folder: it has `tokenizer.json`, and for each file a folder in
`parts` with its tokens. When all are complete, `parts.json` names them, and `--data.source prepared
--data.paths FOLDER` reads them.
"""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer

from examples.trainer.data import bin_files, corpus, fineweb, token_folder, tokenizer
from examples.trainer.data.token_folder import Dataset, Writer, cache_folder
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.validation import STRICT
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically


def prepare(config: DataConfig, say: Callable[[str], None]) -> Dataset:
    """The tokens of the configured text, from the cache if they are complete there."""
    found = open_text(config, say)
    if config.end_token and (has := tokenizer.end_of(found.tokenizer)[0]) != config.end_token:
        raise UserError(
            f"--data.end-token {config.end_token}: the tokens of this text were made with {has}:"
            " leave the flag out, or prepare the text again, with --data.tokenizer and this flag."
        )
    return found


def open_text(config: DataConfig, say: Callable[[str], None]) -> Dataset:
    """The same, before its token between documents is compared with the one that was asked for."""
    if config.source in ("files", "documentation"):
        return prepare_files(config, say)
    if config.source == "bin":
        words = token_folder.named_tokenizer(config.tokenizer or "gpt2", config.end_token)
        return bin_files.prepare(config, words)
    if config.source == "prepared" and len(config.paths) == 1:
        return token_folder.open_parts(Path(config.paths[0]))
    if config.source == "fineweb" and not config.paths:
        return fineweb.prepare(config, say)
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


# Many files, each of which has a folder of its own: a stop loses one of them


@dataclass(frozen=True)
class Preparation:
    """Tokenizes files for runs with --data.source prepared --data.paths OUT."""

    __pydantic_config__ = STRICT

    out: Path
    """Folder for the tokens; the same command continues in it, with the files that are left."""
    paths: tuple[str, ...]
    """Text files, or folders searched for .txt, .md, .py, .jsonl and .ndjson."""
    tokenizer: str
    """gpt2, llama2, a tokenizer.json or a folder with one."""
    end_token: str = ""
    """The token that stands between documents, as in the settings of a run."""
    text_field: str = "text"
    """Where the rows of .jsonl files have their text; each row is a document."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """Share of the documents that is held out for validation, by the hash of their text."""


def prepare_parts(asked: Preparation, say: Callable[[str], None]) -> None:
    """Tokenizes the files that are not done, and names all of them at the end."""
    inputs = {part_of(path): path for path in corpus.named_files(asked.paths)}
    with token_folder.writing_alone(asked.out, say):
        left = [name for name in inputs if not is_done(asked, name, inputs[name])]
        say(f"{len(left)} of {len(inputs)} files to tokenize")
        keep_tokenizer(asked)
        if left:
            (asked.out / token_folder.PARTS).unlink(missing_ok=True)  # until all are complete
        for name in left:
            shown = str(inputs[name]).encode(errors="replace").decode()
            say(f"  {shown}: {tokenize(asked, name, inputs[name]):,} tokens")
        finish(asked, sorted(inputs))
    say(f"complete: --data.source prepared --data.paths {asked.out}")


def part_of(path: Path) -> str:
    """The name of a part, which says where a file lay and how large it was."""
    place = corpus.digest(f"{path} {path.stat().st_size}")[:12]
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', path.stem)[:40]}-{place}"


def is_done(asked: Preparation, name: str, path: Path) -> bool:
    """Whether a part is complete, and its file was not written since and would be read alike."""
    try:
        index = token_folder.read_index(asked.out / "parts" / name)
    except DamagedFileError:
        return False
    return index.complete and index.source == source_of(asked, path)


def source_of(asked: Preparation, path: Path) -> str:
    return f"{path.stat().st_mtime_ns} {asked.text_field} {asked.val_fraction}"


def keep_tokenizer(asked: Preparation) -> None:
    """Writes the tokenizer that all parts have in common, or compares it."""
    made = token_folder.named_tokenizer(asked.tokenizer, asked.end_token)
    path = asked.out / "tokenizer.json"
    if path.exists() and path.read_bytes() != made.to_str().encode():
        raise UserError(
            f"{asked.out} was prepared with another tokenizer: {path} is not the one of"
            f" --tokenizer {asked.tokenizer}, or has another token between documents. Give that"
            " one, or another --out."
        )
    token_folder.keep_tokenizer(asked.out, made)


def tokenize(asked: Preparation, name: str, path: Path) -> int:
    """Writes the shards of a file; returns the number of its tokens."""
    folder = asked.out / "parts" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / token_folder.INDEX).unlink(missing_ok=True)  # of an earlier text
    writer = Writer(folder, asked.out, source_of(asked, path))
    documents = corpus.texts(path, path.stat().st_size, asked.text_field)
    writer.fill(documents, corpus.split_by(asked.val_fraction))
    writer.finish()
    return sum(shard.tokens for shard in (*writer.index.train, *writer.index.val))


def finish(asked: Preparation, names: list[str]) -> None:
    """Names the parts, all of which are complete."""
    indices = [token_folder.read_index(asked.out / "parts" / name) for name in names]
    for split in ("train", "val"):
        if not any(getattr(index, split) for index in indices):
            raise UserError(
                f"none of the documents is {split} text with --val-fraction {asked.val_fraction:g},"
                " so that no run could read them. Give more documents (rows of .jsonl; a plain text"
                " is one), or another fraction with another --out."
            )
    write_atomically(asked.out / token_folder.PARTS, json.dumps(names, indent=1).encode())
