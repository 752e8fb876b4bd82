"""Measurements of a run, one JSON object per line."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.trainer.runs.processes import is_first
from examples.trainer.system import files
from examples.trainer.system.files import Lines

METRICS = "metrics.jsonl"
MATRICES = "matrices.jsonl"
RESUME = "Then resume: the checkpoints are complete."
ADVICE = "Remove that line, or put the file back: only tables and pictures need its figures."


class Metrics:
    """A file with one JSON object per line: `step` and what was measured at that step."""

    def __init__(self, path: Path, step: int, say: Callable[[str], None] = print):
        """Keeps earlier records up to `step`; those of later steps will be written again."""
        self.file = None
        if not is_first():  # process 0 writes for all
            return
        found = read_lines(path)
        if found.torn:
            say(
                f"{path}: its last {found.torn} bytes are no whole line, as a kill or a power cut "
                "leaves them; they are left out."
            )
        kept = [record for record in found.records if record["step"] <= step]
        if found.torn or len(kept) < len(found.records):
            content = "".join(json.dumps(record) + "\n" for record in kept)
            files.write_atomically(path, content.encode())
        self.file = path.open("a")

    def add(self, step: int, **measured: Any) -> None:
        """Appends a record and flushes it, so that others can read it."""
        if self.file:
            with files.explained(self.file.name, "write", RESUME):
                self.file.write(json.dumps({"step": step, **measured}) + "\n")
                self.file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.file:  # network disks may say only now that they are full
            explained = files.explained(self.file.name, "write", RESUME)
            with explained if kind is None else contextlib.suppress(OSError):
                self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a crash cut off is left out."""
    return read_lines(path).records


def read_lines(path: Path) -> Lines:
    """All records, each with a `step` and with numbers or, in MATRICES, a table of them."""
    files.check_no_link(path)
    return files.read_json_lines(path, ADVICE, problem_of)


def problem_of(record: dict[str, Any]) -> str:
    """What is wrong with a record; empty if all is well."""
    if type(record.get("step")) is not int:
        return "without a step"
    others = [name for name, x in record.items() if type(x) not in (int, float, dict)]
    return f"with no number as {others[0]}" if others else ""
