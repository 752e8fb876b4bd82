"""A dataset of the Hugging Face hub, such as FineWeb, streamed into a folder of tokens.

An interrupted stream is continued.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from examples.trainer.data import token_folder, tokenizer
from examples.trainer.data.corpus import text_of
from examples.trainer.data.token_folder import Dataset, Writer
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import DamagedFileError, UserError

TOKENIZER = "gpt2"
TEXT = "text"  # the column of text by default; if there is none, the only one that holds text


class Source(NamedTuple):
    """A split of a dataset of the hub, or of a folder of files that the hub would have."""

    name: str
    config: str | None
    split: str
    column: str
    title: str
    flags: str
    """What asks for it."""


# 100 billion GPT-2 tokens: more than the paper's longest runs, 72 billion.
FINEWEB = Source(
    "HuggingFaceFW/fineweb", "sample-100BT", "train", TEXT, "FineWeb", "--source fineweb"
)


def prepare(config: DataConfig, say: Callable[[str], None], stream: bool = True) -> Dataset:
    """The first `config.tokens` tokens of a source, from the cache if it has them."""
    source = source_of(config)
    kind = "fineweb" if source is FINEWEB else "hub"
    folder = token_folder.cache_folder() / f"{kind}-{cache_key(config, source)}"
    try:
        if not token_folder.is_complete(folder):
            if not stream:
                end = f" --end-token {shlex.quote(config.end_token)}" if config.end_token else ""
                raise UserError(
                    f"{folder} has not all tokens of {source.title} yet. A resume does not ask the "
                    "hub for what a file names, and of several processes all would wait while one "
                    "makes them. Make them before, on one machine: python -m "
                    f"examples.data {source.flags} --tokens {config.tokens:g} --tokenizer "
                    f"{config.tokenizer or TOKENIZER}{end} --val-fraction {config.val_fraction:g}. "
                    "Or give --tokenize."
                )
            with token_folder.writing_alone(folder, say):
                if not token_folder.is_complete(folder):
                    fill(folder, config, source, say)
        return token_folder.open_folder(folder, config.verify)
    except DamagedFileError as error:
        raise UserError(
            f"{error} Delete the folder {folder}: the next run streams it again."
        ) from None


def source_of(config: DataConfig) -> Source:
    """The source that the settings name."""
    if not config.hub:
        return FINEWEB
    name, part, split = (*config.hub.split(":", 2), "", "")[:3]
    if not name:
        raise UserError(f"--data.hub {config.hub}: give NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.")
    flags = f"--hub {shlex.quote(config.hub)}"
    if config.text_field != TEXT:
        flags += f" --text-field {shlex.quote(config.text_field)}"
    return Source(name, part or None, split or "train", config.text_field, config.hub, flags)


def cache_key(config: DataConfig, source: Source) -> str:
    """The name of the cache folder, known without a network."""
    name, end = config.tokenizer or TOKENIZER, config.end_token
    path = tokenizer.file_of(name)
    if name in tokenizer.HUB:
        end = "" if end == tokenizer.HUB[name][1] else end
    elif path.is_file():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        end = "".join(tokenizer.starts(tokenizer.load(path, end)))
    name += end
    parts = (token_folder.FORMAT, *source[:4], name, config.val_fraction, int(config.tokens))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def fill(folder: Path, config: DataConfig, source: Source, say: Callable[[str], None]) -> None:
    stream = open_stream(source)  # first, so that a missing network or package is reported at once
    column = column_of(stream, source)
    if not (folder / "tokenizer.json").exists():
        name = config.tokenizer or TOKENIZER
        made = token_folder.named_tokenizer(name, config.end_token)
        token_folder.keep_tokenizer(folder, made)
    writer, limit = Writer(folder), int(config.tokens)
    say(
        f"streaming {source.title} to {limit:,} training tokens, from {writer.n_tokens:,}; this is "
        f"done once, into {folder}"
    )
    if writer.n_tokens < limit:
        texts = documents(stream, writer.read, column, source)
        if not writer.fill(texts, split_by(config.val_fraction), limit, say):
            say(f"{source.title} ends after {writer.n_tokens:,} training tokens.")
    writer.finish()


def split_by(val_fraction: float) -> Callable[[str], str]:
    return lambda text: "val" if is_held_out(text, val_fraction) else "train"


def is_held_out(text: str, val_fraction: float) -> bool:
    """Whether a document is for validation; copies of a document are always in the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < val_fraction * 2**64


def open_stream(source: Source) -> Any:
    """A stream of all rows of a source; nothing is read yet."""
    use = source.flags.replace("--", "--data.", 1)
    datasets = optional_packages.load("datasets", use, "fineweb")
    try:
        return datasets.load_dataset(
            source.name, name=source.config, split=source.split, streaming=True
        )
    except StopIteration:  # of a file without rows
        raise no_rows(source) from None
    except Exception as error:  # of the network, of the hub, of the package: no common class
        raise tokenizer.unreachable(source.title, error) from None


def no_rows(source: Source) -> UserError:
    return UserError(f"--data.hub {source.title}: the split {source.split} is empty: give another.")


def column_of(stream: Any, source: Source) -> str:
    """The column with the text, found in the first row."""
    if source is FINEWEB:
        return TEXT
    first = next(rows_of(stream, f"the first row of {source.title}"), None)
    if first is None:
        raise no_rows(source)
    found = [name for name, value in first.items() if isinstance(value, str)]
    if source.column == TEXT and TEXT not in first and len(found) == 1:
        return found[0]
    text_of(dict.fromkeys(first), source.column, f"--data.hub {source.title}")
    return source.column


def documents(stream: Any, skip: int, column: str, source: Source) -> Iterator[str]:
    """The texts of the stream after the first `skip`, which are read again but not tokenized."""
    more = f"more of {source.title} (the same command continues from the last complete shard)"
    some = skip > 0
    for number, row in enumerate(rows_of(stream.skip(skip), more), skip + 1):
        text = text_of(row, column, f"row {number} of {source.title}")
        some = some or bool(text.strip())
        yield text
    if not some:
        raise UserError(
            f"{source.title} has no text in {column!r}: give another --data.text-field."
        )


def rows_of(stream: Any, what: str) -> Iterator[dict[str, Any]]:
    """The rows of a stream; `what` names them in errors."""
    try:
        yield from stream
    except Exception as error:  # as above
        raise tokenizer.unreachable(what, error) from None
