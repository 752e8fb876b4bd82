"""The figures of a run: speed, rates and losses, and the file that has them.

The names are Levanter's (`throughput/...`, `grad/norm/total`, `optim/...`).
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from examples.trainer.runs.processes import is_first
from examples.trainer.settings.run import RunConfig, training_flops_per_token
from examples.trainer.system.errors import Diverged
from examples.trainer.system.files import read_json_lines, write_atomically
from examples.trainer.training.step import Measured

METRICS = "metrics.jsonl"
DURATION = "throughput/duration"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
LOADING = "throughput/loading_time"
MFU = "throughput/mfu"
GRADIENT_NORM = "grad/norm/total"
VAL_LOSS = "val_loss"
LEARNING_RATE = "optim/learning_rate"
ADAM_RATE = "optim/adam_lr"

MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite; one more ends the run


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a crash cut off is left out."""
    return read_json_lines(path)


class Metrics:
    """A file with one JSON object per line: `step` and what was measured at that step."""

    def __init__(self, path: Path, step: int):
        """Keeps earlier records up to `step`; those of later steps will be written again."""
        self.file = None
        if is_first():  # process 0 writes for all
            kept = [record for record in read_metrics(path) if record["step"] <= step]
            lines = "".join(json.dumps(record) + "\n" for record in kept)
            write_atomically(path, lines.encode())
            self.file = path.open("a")

    def add(self, step: int, **measured: Any) -> None:
        """Appends a record and flushes it, so that others can read it."""
        if self.file:
            self.file.write(json.dumps({"step": step, **measured}) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()


# Beginnings of `device_kind` in JAX, with operations a second in products of bfloat16 without
# sparsity, by NVIDIA's data sheets and Google Cloud's pages. The first that fits is taken.
PEAKS = (
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA GH200", 989e12),
    ("NVIDIA GB200", 2500e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA A100", 312e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
)


def peak_of(device_kind: str) -> float | None:
    """Operations a second of one device in products of bfloat16; None for one not known here."""
    return next((rate for kind, rate in PEAKS if device_kind.startswith(kind)), None)


class Work(NamedTuple):
    """What a step of a run does, and what its devices could do."""

    tokens: int
    """Tokens of a step, on all devices."""
    flops_per_token: float
    """Operations that the model needs for a token."""
    peak: float | None
    """Operations a second of all devices; None where it is not known, as on a CPU."""

    def measured(self, seconds: float) -> dict[str, float]:
        rate = self.tokens / seconds
        figures = {DURATION: rounded(seconds), TOKENS_PER_SECOND: rounded(rate)}
        if self.peak is not None:
            # Percent, as Levanter has it.
            figures[MFU] = rounded(100 * rate * self.flops_per_token / self.peak)
        return figures


def work_of(config: RunConfig, vocab_size: int, mesh: Mesh) -> Work:
    peak = peak_of(mesh.devices.flat[0].device_kind)
    return Work(
        tokens=config.batch_size * config.model.context,
        flops_per_token=training_flops_per_token(config.model, vocab_size),
        peak=None if peak is None else peak * mesh.size,
    )


def rounded(x: Any, digits: int = 6) -> float:
    """A number with as many digits as mean something."""
    x = float(np.asarray(x))
    return float(f"{x:.{digits}g}") if math.isfinite(x) else x


class Observer(Protocol):
    """Follows a run."""

    def begin(self, step: int) -> None:
        """The run goes on after this step."""

    def record(self, step: int, figures: dict[str, Any]) -> None:
        """A record of `metrics.jsonl` was written."""

    def close(self) -> None:
        """The run has ended."""


class Recorder:
    """Writes and shows the figures of steps, those of a step while the next one is computed."""

    def __init__(self, work: Work, folder: Path, observers: Sequence[Observer], step: int):
        """The records in the folder are kept up to `step`."""
        self.work, self.observers = work, observers
        self.metrics = Metrics(folder / METRICS, step)
        self.saved = step
        """The last step that was saved."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.pending: tuple[int, Measured, float] | None = None
        """The figures of a step that are not written yet."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.metrics.close()

    def add(self, step: int, measured: Measured, waited: float) -> None:
        """Takes the figures of a step, which waited so long for its batch; writes the last ones."""
        self.write()
        self.pending = (step, measured, waited)

    def pause(self) -> None:
        """Writes all figures; the next step is not timed, as something else comes before it."""
        self.write()
        self.clock = None

    def write(self) -> None:
        """Waits for the step whose figures are pending, and writes them."""
        if not self.pending:
            return
        (step, measured, waited), self.pending = self.pending, None
        value = float(measured.loss)
        if not math.isfinite(value):
            self.skip(step)
            return
        now = time.monotonic()
        figures = {
            "train_loss": value,
            GRADIENT_NORM: rounded(measured.grad_norm),
            LEARNING_RATE: rounded(measured.rates.matrices),
            ADAM_RATE: rounded(measured.rates.rest),
        }
        if self.clock is not None:
            figures |= self.work.measured(now - self.clock)
            figures[LOADING] = rounded(waited)
        self.clock, self.skipped = now, 0
        self.record(step, figures)

    def record(self, step: int, figures: dict[str, Any]) -> None:
        self.metrics.add(step, **figures)
        for observer in self.observers:
            observer.record(step, figures)

    def skip(self, step: int) -> None:
        """Records a skipped step; raises `Diverged` after too many in a row."""
        self.skipped += 1
        self.record(step, {"skipped": self.skipped})
        self.clock = None
        if self.skipped > MAX_SKIPPED:
            raise Diverged(step, self.skipped, self.saved)
