"""The rows of a dataset of the Hugging Face hub, and the text in them."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from examples.trainer.data import tokenizer
from examples.trainer.data.files import text_of
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError

TEXT = "text"  # the column of text by default; if there is none, the only one that holds text


@dataclass(frozen=True)
class Source:
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
    rows = iter(stream)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # as above
            raise tokenizer.unreachable(what, error) from None
        if row is None:
            return
        yield row
