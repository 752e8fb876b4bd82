"""The results of a sweep: `runs.jsonl`, one JSON object for each finished run."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.trainer.runs.metrics import METRICS
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from lab.sweeps import machine
from lab.sweeps.grid import Method, Trial

ADVICE = "Remove the line to have that run done again."


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    val: list[tuple[int, float]]
    """Step and validation loss, in nats per token."""
    bits_per_byte: float | None
    """At the end; None if it was never evaluated, or if the tokenizer loses text."""
    diverged_at: int | None
    """The step at which the run was given up because its loss stayed not finite, or None."""
    seconds: float
    """Duration with compilation; for a resumed run, of its last part only."""
    commit: str = ""
    """The code that finished the run; empty in older ledgers."""
    processor: str = ""

    @property
    def loss(self) -> float:
        """Returns the last validation loss; infinite for a run that diverged."""
        if self.diverged_at is not None or not self.val:
            return math.inf
        last = self.val[-1][1]
        return last if math.isfinite(last) else math.inf


class Ledger:
    """The file of results, to which several processes may write."""

    def __init__(self, folder: Path):
        self.path = folder / "runs.jsonl"

    def results(self) -> dict[Trial, Result]:
        try:
            return dict(map(parse, files.read_json_lines(self.path)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self.path} has a line that is not the record of a run: {error!r}. {ADVICE}"
            ) from None

    def losses(self) -> dict[Trial, float]:
        return {trial: result.loss for trial, result in self.results().items()}

    def add(self, trial: Trial, result: Result) -> None:
        """Appends a finished run in one write, so that lines of several processes do not mix."""
        record = {**dataclasses.asdict(trial), **dataclasses.asdict(result)}
        line = json.dumps(record) + "\n"
        with self.path.open("a+b", buffering=0) as file:
            # What a power cut has left becomes a line of its own, which is named when it is read.
            file.seek(0)
            before = "" if (file.read() or b"\n").endswith(b"\n") else "\n"
            file.write((before + line).encode())


def parse(record: dict[str, Any]) -> tuple[Trial, Result]:
    trial = Trial(Method(**record.pop("method")), record.pop("rate"), record.pop("seed"))
    record.pop("train", None)  # a curve that ledgers had
    val = [tuple(point) for point in record.pop("val")]
    return trial, Result(val, **record)


def measured(folder: Path, diverged_at: int | None, seconds: float) -> Result:
    """Reads the result of a finished run from its metrics."""
    records = files.read_json_lines(folder / METRICS)
    val = [record for record in records if "val_loss" in record]
    return Result(
        val=[(record["step"], record["val_loss"]) for record in val],
        bits_per_byte=val[-1].get("val_bits_per_byte") if val else None,
        diverged_at=diverged_at,
        seconds=round(seconds, 1),
        commit=machine.commit(),
        processor=machine.processor(),
    )
