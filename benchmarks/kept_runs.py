"""A file of finished runs, one in each line, so that what was stopped can go on."""

import json
import math
import os
from pathlib import Path
from typing import Any

from benchmarks.rate_curves import Losses, Run
from examples.trainer.system import json_lines

ADVICE = "Remove the line to have that run done again."


class KeptRuns:
    """The runs in a file, of which those count that were made under the same circumstances."""

    def __init__(self, path: Path | None, about: dict[str, Any]):
        """Takes the file, None to keep nothing, and what a loss depends on beside the run."""
        self.path, self.about = path, about

    def losses(self) -> Losses:
        """The losses of the runs that are there; the half line that a kill has left is cut off."""
        if self.path is None:
            return {}
        lines = json_lines.read(self.path, ADVICE, problem_of)
        if lines.torn:
            os.truncate(self.path, self.path.stat().st_size - lines.torn)
        return {
            Run(row["method"], row["rate"], row["seed"]): row["validation_loss"] or math.inf
            for row in lines.records
            if row["about"] == self.about
        }

    def add(self, run: Run, loss: float) -> None:
        """Appends a run."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row(run, loss) | {"about": self.about}) + "\n")


def problem_of(record: dict[str, Any]) -> str:
    """What a line lacks, in words."""
    lacking = {*Run._fields, "validation_loss", "about"} - record.keys()
    return f"without {', '.join(sorted(lacking))}" if lacking else ""


def row(run: Run, loss: float) -> dict[str, Any]:
    """A run and its loss as JSON, which has no infinity."""
    return {**run._asdict(), "validation_loss": loss if math.isfinite(loss) else None}
