"""The documents in a file: plain text is one document, .jsonl and .parquet have one per row."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError
from examples.trainer.system.json_lines import parse

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
ROWS_AT_ONCE = 1024  # of a .parquet file in memory


def texts(path: Path, size: int, field: str) -> Iterator[str]:
    """The documents of a file that the user named; of plain text only the first `size` bytes.

    `field` is the field of .jsonl and .parquet rows that holds the text.
    """
    try:
        if path.suffix == ".jsonl":
            yield from json_lines(path, field)
        elif path.suffix == ".parquet":
            yield from parquet_rows(path, field)
        else:
            yield decode(path, size)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): convert it or omit it.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    except MemoryError:
        raise UserError(
            f"{path} does not fit into memory: give a smaller --data.max-bytes, or text files of "
            "parts of it."
        ) from None


def decode(path: Path, size: int) -> str:
    """The first `size` bytes of a text file, exactly; raises `UnicodeDecodeError`, `OSError`."""
    with path.open("rb") as file:
        content = file.read(size)
    # An incomplete character is dropped at the limit, but is an error at the end of the file.
    decoder = codecs.getincrementaldecoder("utf-8")()
    return decoder.decode(content, final=len(content) < size)


def json_lines(path: Path, field: str) -> Iterator[str]:
    """The text in each line's object; empty lines are skipped and nulls count as empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = parse(line, where, "A .jsonl file has one object in each line.")
            yield text_of(row, field, where)


def text_of(row: object, field: str, where: str) -> str:
    """The text of a row; `where` names the row in errors."""
    if not isinstance(row, dict) or field not in row:
        has = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(
            f"{where} has no field {field!r}, but {has or 'nothing'}: name the one that holds the "
            "text with --data.text-field."
        )
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where} has no text in {field!r}, but {str(text)[:40]!r}: omit it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a character: "\ud800"
        raise UserError(f"{where} is not text that UTF-8 can write ({error}): omit it.") from None
    return text


def parquet_rows(path: Path, field: str) -> Iterator[str]:
    """The text in each row of a table; nulls count as empty."""
    parquet = optional_packages.load("pyarrow.parquet", f"{path}, a .parquet file,", "fineweb")
    arrow = optional_packages.load("pyarrow", "a .parquet file", "fineweb")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                text_of(dict.fromkeys(names), field, str(path))
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield text_of({field: text}, field, str(path))
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read as a .parquet file: {error}") from None
