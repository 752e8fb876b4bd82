"""Measurements of a run, one JSON object per line."""

import contextlib
import json
from pathlib import Path
from typing import Any

from examples.runs.processes import is_first
from examples.system.errors import UserError
from examples.system.files import write_atomically

METRICS = "metrics.jsonl"
MATRICES = "matrices.jsonl"


class Metrics:
    """A file with one JSON object per line: `step` and what was measured at that step."""

    def __init__(self, path: Path, step: int):
        """Keeps earlier records up to `step`; those of later steps will be written again."""
        self.file = None
        if not is_first():  # process 0 writes for all
            return
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.file = path.open("a")

    def add(self, step: int, **measured: Any) -> None:
        """Appends a record and flushes it, so that others can read it."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({"step": step, **measured}) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.file.name}: {error.strerror}. The checkpoints are complete: "
                "make room or repair the disk, and resume."
            ) from None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # `add` has already reported the error
                self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a crash cut off is ignored."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")  # the part after the last line end is incomplete
    return [json.loads(line) for line in lines[:-1]]
