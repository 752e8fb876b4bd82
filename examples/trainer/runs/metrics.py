"""The figures of a run: recorded in its file, shown in the terminal, and sent to dashboards.

The names are Levanter's (`throughput/...`, `grad/norm/total`, `optim/...`).
"""

import contextlib
import dataclasses
import json
import math
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.trainer.runs.processes import is_first
from examples.trainer.settings.run import RunConfig, TrackerName, training_flops_per_token
from examples.trainer.system.errors import Diverged, load_package
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

Observers = Sequence["Display | Tracker"]
QUIET_SECONDS = 10.0  # after which a line says how far the run is, where there is no bar
TIMED = 50  # steps whose medians are shown
MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite; one more ends the run


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
    """Operations a second of one device; None for one not known here."""
    return next((rate for kind, rate in PEAKS if device_kind.startswith(kind)), None)


def work_of(config: RunConfig, vocab_size: int, mesh: Mesh) -> dict[str, float]:
    """The work of a step, by the figure that it gives when divided by the seconds of the step.

    These are tokens, and operations in percent of what the devices do in a second, if known.
    """
    work = {TOKENS_PER_SECOND: float(config.batch_size * config.model.context)}
    if peak := peak_of(mesh.devices.flat[0].device_kind):
        flops = work[TOKENS_PER_SECOND] * training_flops_per_token(config.model, vocab_size)
        work[MFU] = 100 * flops / (peak * mesh.size)  # in percent, as Levanter has it
    return work


def rounded(x: Any) -> float:
    """A number with as many digits as mean something."""
    return float(f"{float(x):.6g}")


class Recorder:
    """Writes and shows a record of each step, while the devices compute the next one."""

    def __init__(self, work: dict[str, float], folder: Path, observers: Observers, step: int):
        """The records in the folder are kept up to `step`; later steps will be written again."""
        self.work, self.observers, self.file = work, observers, None
        if is_first():  # process 0 writes for all
            path = folder / METRICS
            kept = [record for record in read_json_lines(path) if record["step"] <= step]
            lines = "".join(json.dumps(record) + "\n" for record in kept)
            write_atomically(path, lines.encode())
            self.file = path.open("a", buffering=1)  # a line at a time, for others to read
        self.saved = step
        """The last step that was saved."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.pending: tuple[int, Measured, float] | None = None
        """The figures of a step that are not written yet."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""

    def __enter__(self) -> "Recorder":
        for observer in self.observers:
            observer.begin(self.saved)
        return self

    def __exit__(self, *error: Any) -> None:
        for observer in self.observers:
            observer.close()
        if self.file:
            self.file.close()

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
            seconds = now - self.clock
            figures |= {DURATION: rounded(seconds), LOADING: rounded(waited)}
            figures |= {name: rounded(done / seconds) for name, done in self.work.items()}
        self.clock, self.skipped = now, 0
        self.record(step, figures)

    def record(self, step: int, figures: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps({"step": step, **figures}) + "\n")
        for observer in self.observers:
            observer.record(step, figures)

    def skip(self, step: int) -> None:
        """Records a skipped step; raises `Diverged` after too many in a row."""
        self.skipped += 1
        self.record(step, {"skipped": self.skipped})
        self.clock = None
        if self.skipped > MAX_SKIPPED:
            raise Diverged(step, self.skipped, self.saved)


class Display:
    """Shows step, loss, speed and remaining time."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps = console, steps
        self.timed: deque[dict[str, Any]] = deque(maxlen=TIMED)
        """The figures of the last steps without compilation and evaluation."""
        self.printed, self.line = time.monotonic(), ""
        self.status = "compiling ..."
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,  # the last line of the bar is that of the last evaluation, above it
        )
        self.task = self.bar.add_task("", total=steps, status=self.status)

    def begin(self, step: int) -> None:
        self.bar.update(self.task, completed=step)
        if 0 < step < self.steps:
            self.console.print(f"from step {step} on")
        if not self.console.is_terminal and not self.bar.finished:
            self.console.print(self.status)
        self.bar.start()

    def close(self) -> None:
        self.bar.stop()

    def record(self, step: int, figures: dict[str, Any]) -> None:
        if "train_loss" in figures:
            self.trained(step, figures)
        elif "skipped" in figures:
            self.print(step, "loss or gradient not finite: left out")
        else:
            self.evaluated(step, figures)

    def print(self, step: int, line: str) -> None:
        self.printed = time.monotonic()
        line = f"step {step}/{self.steps}  {line}"
        if line != self.line:  # before an evaluation it may be there already
            self.console.print(line, highlight=False)
        self.line = line

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        parts = [f"loss {figures['train_loss']:.3f}", f"grad {figures[GRADIENT_NORM]:.2f}"]
        if DURATION in figures:
            self.timed.append(figures)
        if self.timed:
            parts.append(f"{self.median(TOKENS_PER_SECOND):,.0f} tokens/s")
            if MFU in self.timed[-1]:
                parts.append(f"MFU {self.median(MFU):.1f}%")
            left = round(self.median(DURATION) * (self.steps - step))
            parts.append(f"{left // 60}:{left % 60:02d} left")
        self.status = "  ".join(parts)
        self.bar.update(self.task, completed=step, status=self.status)
        quiet = time.monotonic() - self.printed > QUIET_SECONDS
        if quiet and not self.console.is_terminal:
            self.print(step, self.status)

    def median(self, name: str) -> float:
        """That of the last steps: single ones differ much."""
        return statistics.median(figures[name] for figures in self.timed)

    def evaluated(self, step: int, figures: dict[str, Any]) -> None:
        self.print(step, self.status)
        self.console.print(
            f"{'':8}val loss {figures['val_loss']:.3f}  "
            f"perplexity {figures['val_perplexity']:.5g}  "
            f"bits per byte {figures['val_bits_per_byte']:.3f}",
        )


# Dashboards: TensorBoard, and Weights & Biases


def package_of(name: TrackerName) -> Any:
    return load_package({"tensorboard": "tensorboardX"}.get(name, name), f"--tracker {name}", name)


class Tracker:
    """Gives the figures of a run to a dashboard. One that fails is left out; the run goes on."""

    def __init__(
        self, name: TrackerName, folder: Path, config: RunConfig, say: Callable[[str], None]
    ):
        self.name, self.folder, self.config, self.say = name, folder, config, say
        self.board: Any = package_of(name)

    def begin(self, step: int) -> None:
        with self.attempt():
            if self.name == "tensorboard":
                # TensorBoard hides what an earlier process wrote of the steps that come again.
                place = str(self.folder / "tensorboard")
                self.board = self.board.SummaryWriter(place, purge_step=step + 1)
                return
            own = self.folder / "tracker_id"  # of this run, wherever its folder is moved
            if not own.exists():
                own.write_text(secrets.token_hex(8))
            again = {"id": own.read_text(), "resume": "allow", "dir": str(self.folder)}
            self.board.init(name=self.folder.name, config=dataclasses.asdict(self.config), **again)

    def record(self, step: int, figures: dict[str, Any]) -> None:
        with self.attempt():
            if self.name == "wandb":
                self.board.log(figures, step=step)
                return
            for name, value in figures.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        with self.attempt():
            self.board.finish() if self.name == "wandb" else self.board.close()

    @contextlib.contextmanager
    def attempt(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # of the network, the disk, the package: no common class
            if self.board is not None:
                self.say(f"--tracker {self.name} is left out from here on: {error}")
            self.board = None
