"""Reading .jsonl files: one JSON object in each line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from examples.trainer.system import files
from examples.trainer.system.errors import UserError


class Lines(NamedTuple):
    """The content of a .jsonl file."""

    records: list[dict[str, Any]]
    torn: int
    """Bytes after the last whole line: half a line or zero bytes, as a kill or a power cut leaves
    them. They are in no record."""


def read(
    path: Path, advice: str, problem_of: Callable[[dict[str, Any]], str] = lambda record: ""
) -> Lines:
    """All records of a file, none if there is no file; empty lines are skipped.

    A line that is no JSON object, or a record with a problem (in words that follow it), raises
    `UserError`, which says which, and `advice`.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Lines([], 0)
    except OSError as error:
        raise files.failure(error, path, "read") from None
    end = content.rstrip(b"\0").rfind(b"\n") + 1
    records = []
    for number, line in enumerate(content[:end].split(b"\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            record = parse(line, where, advice)
            if not isinstance(record, dict):
                raise UserError(f"{where} is {shown(record)}, and not a JSON object. {advice}")
            if problem := problem_of(record):
                raise UserError(f"{where} is a record {problem}. {advice}")
            records.append(record)
    return Lines(records, len(content) - end)


def parse(line: bytes, where: str, advice: str) -> Any:
    """The value of a line; `where` names the line in errors."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise UserError(f"{where} is not JSON ({error}). {advice}") from None


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
