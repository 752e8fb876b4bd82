"""The results of a sweep: `runs.jsonl`, one JSON object for each finished run."""

import dataclasses
import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.errors import UserError
from examples.grid import Cell, Method
from examples.runs import read_metrics

POINTS = 100  # of a training curve: means over as many parts of it, since single batches are noisy


@dataclass(frozen=True)
class Result:
    """What is kept of a run."""

    val: list[tuple[int, float]]
    """Step and validation loss, in nats per token."""
    train: list[tuple[float, float]]
    """Middle of some steps, and their mean training loss."""
    bits_per_byte: float | None
    """At the end; None if it has none, as the following."""
    diverged_at: int | None
    """The step at which the loss stayed not finite; None: it never did."""
    seconds: float
    """From the first step, compiling included, to the end; of the last part, if it was resumed."""

    @property
    def loss(self) -> float:
        """The last validation loss; infinite for a run that diverged."""
        return math.inf if self.diverged_at is not None or not self.val else self.val[-1][1]


class Ledger:
    """The file, to which several processes may write."""

    def __init__(self, folder: Path):
        self.path = folder / "runs.jsonl"

    def results(self) -> dict[Cell, Result]:
        """All that is finished."""
        if not self.path.exists():
            return {}
        return dict(self.parse(line) for line in self.path.read_text().split("\n")[:-1] if line)

    def losses(self) -> dict[Cell, float]:
        """The last validation losses."""
        return {cell: result.loss for cell, result in self.results().items()}

    def add(self, cell: Cell, result: Result) -> None:
        """Writes down a finished run; a line is written whole, whoever else writes."""
        record = {**dataclasses.asdict(cell), **dataclasses.asdict(result)}
        line = json.dumps(record) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def parse(self, line: str) -> tuple[Cell, Result]:
        """A line of the file."""
        try:
            record: dict[str, Any] = json.loads(line)
            cell = Cell(Method(**record.pop("method")), record.pop("rate"), record.pop("seed"))
            for curve in ("val", "train"):
                record[curve] = [tuple(point) for point in record[curve]]
            return cell, Result(**record)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path} has a line that is not the record of a run: {error!r}. Remove the "
                "line to have that run done again."
            ) from None


def measured(folder: Path, diverged_at: int | None, seconds: float) -> Result:
    """What the metrics of a finished run say."""
    records = read_metrics(folder / "metrics.jsonl")
    val = [record for record in records if "val_loss" in record]
    return Result(
        val=[(record["step"], record["val_loss"]) for record in val],
        train=smooth([(r["step"], r["train_loss"]) for r in records if "train_loss" in r]),
        bits_per_byte=val[-1]["val_bits_per_byte"] if val else None,
        diverged_at=diverged_at,
        seconds=round(seconds, 1),
    )


def smooth(curve: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Means over at most POINTS parts of equally many steps, but for the last."""
    size = -(-len(curve) // POINTS) or 1
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [
        (statistics.fmean(step for step, _ in part), statistics.fmean(loss for _, loss in part))
        for part in parts
    ]
