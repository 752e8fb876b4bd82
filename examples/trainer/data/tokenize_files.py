"""Tokenizes many files: an output for each of them, so that a stop loses one.

A folder that was prepared has `tokenizer.json` and for each file a folder in `parts` with its
tokens. When all are complete, `parts.json` names them, and `--data.source prepared --data.paths
FOLDER` reads them. The tokenizer uses all cores.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from examples.trainer.data import corpus, token_folder
from examples.trainer.data.token_folder import Writer
from examples.trainer.settings.validation import STRICT
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically


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


def prepare_files(asked: Preparation, say: Callable[[str], None]) -> None:
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
