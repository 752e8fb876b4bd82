"""The figures of a run: speed, rates and memory, and the file with one JSON object per line.

The names are Levanter's (`throughput/...`, `grad/norm/total`, `optim/...`).
`memory/peak_bytes_in_use` is the statistic of JAX, largest of the devices of process 0.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from examples.compiled_programs import chips
from examples.trainer.runs.processes import is_first
from examples.trainer.settings.model import training_flops_per_token
from examples.trainer.system import files
from examples.trainer.system.files import Lines
from examples.trainer.training.program import TrainingSetup

METRICS = "metrics.jsonl"
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
    """All records, each with a `step` and with numbers."""
    files.check_no_link(path)
    return files.read_json_lines(path, ADVICE, problem_of)


def problem_of(record: dict[str, Any]) -> str:
    """What is wrong with a record; empty if all is well."""
    if type(record.get("step")) is not int:
        return "without a step"
    others = [name for name, x in record.items() if type(x) not in (int, float)]
    return f"with no number as {others[0]}" if others else ""


DURATION = "throughput/duration"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
LOADING = "throughput/loading_time"
MFU = "throughput/mfu"
GRADIENT_NORM = "grad/norm/total"


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


def work_of(setup: TrainingSetup) -> Work:
    config = setup.config
    vocabulary = setup.dataset.tokenizer.get_vocab_size()
    peak = chips.peak(setup.mesh.devices.flat[0].device_kind)
    return Work(
        tokens=config.batch_size * config.model.context,
        flops_per_token=training_flops_per_token(config.model, vocabulary),
        peak=None if peak is None else peak * setup.mesh.size,
    )


def peak_memory() -> dict[str, int]:
    """The most bytes that programs have used on a device; empty where devices do not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return {"memory/peak_bytes_in_use": max(used)} if used else {}


def rounded(x: Any, digits: int = 6) -> float:
    """A number with as many digits as mean something."""
    x = float(np.asarray(x))
    return float(f"{x:.{digits}g}") if math.isfinite(x) else x


def updates_made(opt_state: optax.OptState) -> int:
    """How many updates an optimizer has made; steps that were skipped are not among them."""
    kind = optax.ScaleByScheduleState
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    return int(next(state for state in states if isinstance(state, kind)).count)
