"""What is seen of a run: a live bar, or plain lines without a terminal, and dashboards.

The dashboards are TensorBoard, Weights & Biases, and Trackio. `metrics.jsonl` is the record: a
tracker that fails, because its server cannot be reached for example, is left out from then on, and
the run goes on.
"""

import dataclasses
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.trainer.runs import processes
from examples.trainer.runs.metrics import GRADIENT_NORM, MFU, TOKENS_PER_SECOND
from examples.trainer.settings.machines import TrackerName
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.training.evaluate import in_words, short


def in_short(figures: dict[str, Any]) -> str:
    """Loss, gradient norm, speed and MFU of a step; the last two where they were measured."""
    parts = [f"loss {figures['train_loss']:.3f}", f"grad {figures[GRADIENT_NORM]:.2f}"]
    if TOKENS_PER_SECOND in figures:
        parts.append(f"{figures[TOKENS_PER_SECOND]:,.0f} tokens/s")
    if MFU in figures:
        parts.append(f"MFU {figures[MFU]:.1f}%")
    return "  ".join(parts)


class Display:
    """Shows step, loss, speed and remaining time."""

    def __init__(self, console: Console, steps: int, evaluations: bool = True):
        self.console, self.steps, self.evaluations = console, steps, evaluations
        self.first: tuple[int, float] | None = None
        self.speeds: dict[str, list[float]] = {}
        """Of the steps since the last line, which has medians: single steps differ much."""
        self.status = "compiling ..."
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
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
        elif "skipped_above" in figures:
            norm, bound = figures[GRADIENT_NORM], figures["skipped_above"]
            self.print(step, f"gradient {norm:.4g} > {bound:.4g}: left out")
        elif "skipped" in figures:
            self.print(step, "loss or gradient not finite: left out")
        elif self.evaluations:
            self.evaluated(step, figures)

    def print(self, step: int, line: str) -> None:
        self.console.print(f"step {step}/{self.steps}  {line}", highlight=False)

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.first is None:  # timing starts here, so that compilation does not count
            self.first = (step, now)
        for name in {TOKENS_PER_SECOND, MFU}.intersection(figures):
            self.speeds.setdefault(name, []).append(figures[name])
        figures = figures | {name: statistics.median(x) for name, x in self.speeds.items()}
        self.status = f"{in_short(figures)}  {self.time_left(step, now)}"
        self.bar.update(self.task, completed=step, status=self.status)

    def time_left(self, step: int, now: float) -> str:
        """The remaining time at the mean speed since the first step."""
        step_0, time_0 = self.first or (step, now)
        if step == step_0:
            return ""
        seconds = round((now - time_0) / (step - step_0) * (self.steps - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def evaluated(self, step: int, figures: dict[str, Any]) -> None:
        self.speeds.clear()
        parts = {name: x for name, x in figures.items() if name.startswith("val_loss/")}
        self.print(
            step,
            f"{self.status}\n"
            f"{'':8}val loss {figures['val_loss']:.3f}  "
            f"perplexity {short(figures['val_perplexity'])}  "
            f"bits per byte {in_words(figures.get('val_bits_per_byte'), 3)}"
            + "".join(f"\n{'':8}{x:.3f} {name.partition('/')[2]}" for name, x in parts.items()),
        )


PACKAGES: dict[TrackerName, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
}
PROJECT = "optax_muonplus"
ID = "tracker_id"


class Tracker:
    """Gives the figures of a run to a dashboard, until that fails."""

    def __init__(
        self, name: TrackerName, folder: Path, config: RunConfig, say: Callable[[str], None]
    ):
        self.name, self.folder, self.config, self.say = name, folder, config, say
        self.package: Any = None
        """What takes the figures: None before the run and after a failure."""

    def begin(self, step: int) -> None:
        self.package = package_of(self.name)
        self.attempt(lambda: self.start(step))

    def start(self, step: int) -> None:
        if self.name == "tensorboard":
            # TensorBoard hides what an earlier process wrote of the steps that come again.
            place = str(self.folder / "tensorboard")
            self.package = self.package.SummaryWriter(place, purge_step=step + 1)
            return
        # Trackio has the functions of Weights & Biases; environment variables set both up.
        given: dict[str, Any] = {"config": dataclasses.asdict(self.config), "resume": "allow"}
        if self.name == "wandb":
            given |= {"dir": str(self.folder), "id": identity(self.folder)}
        project = os.environ.get(f"{self.name.upper()}_PROJECT", PROJECT)
        self.package.init(project=project, name=self.folder.name, **given)

    def attempt(self, work: Callable[[], Any]) -> None:
        if self.package is None:
            return
        try:
            work()
        except Exception as error:  # of the network, of the disk, of the package: no common class
            self.package = None
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            self.say(
                f"--tracker {self.name} is left out from here on: {reason}. The run goes on, and"
                " metrics.jsonl has all figures."
            )

    def record(self, step: int, figures: dict[str, Any]) -> None:
        self.attempt(lambda: self.log(step, figures))

    def log(self, step: int, figures: dict[str, Any]) -> None:
        if self.name != "tensorboard":
            self.package.log(figures, step=step)
            return
        for name, value in figures.items():
            self.package.add_scalar(name, value, step)
        self.package.flush()

    def close(self) -> None:
        self.attempt(
            lambda: self.package.close() if self.name == "tensorboard" else self.package.finish()
        )


def identity(folder: Path) -> str:
    """A name that no other run has, kept in the folder of the run."""
    path = folder / ID
    if not path.exists():
        files.write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text()


def package_of(name: TrackerName) -> Any:
    return optional_packages.load(PACKAGES[name], f"--tracker {name}", name)


def trackers(
    names: Sequence[TrackerName], folder: Path, config: RunConfig, say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers that flags name, in the process that writes."""
    asked = dict.fromkeys(names) if processes.is_first() else ()
    return [Tracker(name, folder, config, say) for name in asked]


Observer = Display | Tracker
"""Follows a run: `begin` after a step, `record` for each record of `metrics.jsonl`, `close`."""
