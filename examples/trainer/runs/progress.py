"""Who follows a run: a live bar in a terminal, plain lines elsewhere, and dashboards."""

import contextlib
import dataclasses
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.trainer.runs.metrics import DURATION, GRADIENT_NORM, MFU, TOKENS_PER_SECOND
from examples.trainer.settings.run import RunConfig, TrackerName
from examples.trainer.system.errors import load_package
from examples.trainer.training.evaluate import short

QUIET_SECONDS = 10.0  # after which a line says how far the run is, where there is no bar
TIMED = 50  # steps whose median the remaining time is from


class Display:
    """Shows step, loss, speed and remaining time."""

    def __init__(self, console: Console, steps: int, evaluations: bool = True):
        self.console, self.steps, self.evaluations = console, steps, evaluations
        self.timed: dict[str, list[float]] = {TOKENS_PER_SECOND: [], MFU: []}
        """Of the steps since the last line, which has medians: single steps differ much."""
        self.seconds: deque[float] = deque(maxlen=TIMED)
        """Durations of the last steps."""
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
        elif self.evaluations:
            self.evaluated(step, figures)

    def print(self, step: int, line: str) -> None:
        self.printed = time.monotonic()
        line = f"step {step}/{self.steps}  {line}"
        if line != self.line:  # before an evaluation it may be there already
            self.console.print(line, highlight=False)
        self.line = line

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        for name, values in self.timed.items():
            if name in figures:
                values.append(figures[name])
        if DURATION in figures:
            self.seconds.append(figures[DURATION])
        self.status = f"{self.in_short(figures)}  {self.time_left(step)}".rstrip()
        self.bar.update(self.task, completed=step, status=self.status)
        quiet = time.monotonic() - self.printed > QUIET_SECONDS
        if quiet and self.evaluations and not self.console.is_terminal:
            self.print(step, self.status)

    def in_short(self, figures: dict[str, Any]) -> str:
        """Loss, gradient norm, speed and MFU of a step; the last two where they were measured."""
        parts = [f"loss {figures['train_loss']:.3f}", f"grad {figures[GRADIENT_NORM]:.2f}"]
        if speeds := self.timed[TOKENS_PER_SECOND]:
            parts.append(f"{statistics.median(speeds):,.0f} tokens/s")
        if used := self.timed[MFU]:
            parts.append(f"MFU {statistics.median(used):.1f}%")
        return "  ".join(parts)

    def time_left(self, step: int) -> str:
        """The remaining time by the median step, which has no compilation and no evaluation."""
        if not self.seconds:
            return ""
        seconds = round(statistics.median(self.seconds) * (self.steps - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def evaluated(self, step: int, figures: dict[str, Any]) -> None:
        self.print(step, self.status)
        self.console.print(
            f"{'':8}val loss {figures['val_loss']:.3f}  "
            f"perplexity {short(figures['val_perplexity'])}  "
            f"bits per byte {figures['val_bits_per_byte']:.3f}",
        )
        for values in self.timed.values():
            values.clear()


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
