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
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from examples.trainer.runs import processes
from examples.trainer.runs.metrics import GRADIENT_NORM, MFU, TOKENS_PER_SECOND
from examples.trainer.settings.machines import TrackerName
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.training.evaluate import Evaluation, in_words, short


class Observer:
    """Receives the events of a training loop; what a subclass does not define does nothing."""

    def begin(self, step: int) -> None:
        """The run starts from this step."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        """A step is finished; its figures have the names of `metrics.jsonl`."""

    def skipped(self, step: int) -> None:
        """A step was skipped because its loss or gradient was not finite."""

    def left_out(self, step: int, norm: float, bound: float) -> None:
        """A step was skipped because the norm of its gradient was above a bound."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The state after a step was evaluated."""


def in_short(figures: dict[str, Any]) -> str:
    """Loss, gradient norm, speed and MFU of a step; the last two where they were measured."""
    parts = [f"loss {figures['train_loss']:.3f}", f"grad {figures[GRADIENT_NORM]:.2f}"]
    if TOKENS_PER_SECOND in figures:
        parts.append(f"{figures[TOKENS_PER_SECOND]:,.0f} tokens/s")
    if MFU in figures:
        parts.append(f"MFU {figures[MFU]:.1f}%")
    return "  ".join(parts)


class Display(Observer):
    """Shows step, loss, speed and remaining time."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self.steps = steps
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

    def __enter__(self) -> "Display":
        if not self.console.is_terminal and not self.bar.finished:
            self.console.print(self.status)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

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

    def skipped(self, step: int) -> None:
        self.console.print(f"step {step}/{self.steps}  loss or gradient not finite: left out")

    def left_out(self, step: int, norm: float, bound: float) -> None:
        self.console.print(f"step {step}/{self.steps}  gradient {norm:.4g} > {bound:.4g}: left out")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.speeds.clear()
        self.console.print(
            f"step {step}/{self.steps}  {self.status}\n"
            f"{'':8}val loss {evaluation.val_loss:.3f}  "
            f"perplexity {short(evaluation.val_perplexity)}  "
            f"bits per byte {in_words(evaluation.val_bits_per_byte, 3)}"
            + "".join(f"\n{'':8}{loss:.3f} {name}" for name, loss in evaluation.of_parts.items()),
            highlight=False,
        )


PACKAGES: dict[TrackerName, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
}
PROJECT = "optax_muonplus"
ID = "tracker_id"


class Backend(Protocol):
    """What a tracker does with figures."""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Takes the figures of a step."""

    def close(self) -> None:
        """Sends or writes what it still holds."""


class TensorBoard:
    """Files in the folder of the run, for `tensorboard --logdir`."""

    def __init__(self, package: Any, folder: Path, config: RunConfig, start: int):
        # TensorBoard hides what an earlier process wrote of the steps that come again.
        self.writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Sender:
    """Weights & Biases, or Trackio, which has its functions; environment variables set them up."""

    def __init__(self, package: Any, folder: Path, config: RunConfig, start: int):
        self.package = package
        name = package.__name__
        given: dict[str, Any] = {"config": dataclasses.asdict(config), "resume": "allow"}
        if name == "wandb":
            given |= {"dir": str(folder), "id": identity(folder)}
        project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
        package.init(project=project, name=folder.name, **given)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self.package.log(figures, step=step)

    def close(self) -> None:
        self.package.finish()


def identity(folder: Path) -> str:
    """A name that no other run has, kept in the folder of the run."""
    path = folder / ID
    if not path.exists():
        files.write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text()


class Tracker(Observer):
    """Gives the events of a run to a tracker, until it fails."""

    def __init__(
        self, name: TrackerName, folder: Path, config: RunConfig, say: Callable[[str], None]
    ):
        self.name, self.folder, self.config, self.say = name, folder, config, say
        self.backend: Backend | None = None

    def begin(self, step: int) -> None:
        made = TensorBoard if self.name == "tensorboard" else Sender

        def start() -> None:
            self.backend = made(package_of(self.name), self.folder, self.config, step)

        self.attempt(start)

    def attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of the network, of the disk, of the package: no common class
            self.backend = None
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            self.say(
                f"--tracker {self.name} is left out from here on: {reason}. The run goes on, and"
                " metrics.jsonl has all figures."
            )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        if backend := self.backend:
            self.attempt(lambda: backend.log(step, figures))

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        self.log(step, figures)

    def skipped(self, step: int) -> None:
        self.log(step, {"skipped": 1})

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.log(step, evaluation.figures())

    def __exit__(self, *error: object) -> None:
        if backend := self.backend:
            self.attempt(backend.close)


class Observers(Observer):
    """Gives each event to several observers."""

    def __init__(self, observers: Sequence[Observer]):
        self.observers = observers

    def begin(self, step: int) -> None:
        for each in self.observers:
            each.begin(step)

    def __enter__(self) -> object:
        for each in self.observers:
            each.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.observers:
            each.__exit__(*error)

    def trained(self, step: int, figures: dict[str, Any]) -> None:
        for each in self.observers:
            each.trained(step, figures)

    def skipped(self, step: int) -> None:
        for each in self.observers:
            each.skipped(step)

    def left_out(self, step: int, norm: float, bound: float) -> None:
        for each in self.observers:
            each.left_out(step, norm, bound)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        for each in self.observers:
            each.evaluated(step, evaluation)


def package_of(name: TrackerName) -> Any:
    return optional_packages.load(PACKAGES[name], f"--tracker {name}", name)


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Refuses a tracker whose package is missing."""
    for name in names:
        package_of(name)


def observers(
    display: Observer,
    names: Sequence[TrackerName],
    folder: Path,
    config: RunConfig,
    say: Callable[[str], None],
) -> Observer:
    """The display, and in the process that writes, the trackers."""
    asked = dict.fromkeys(names) if processes.is_first() else ()
    return Observers([display, *(Tracker(name, folder, config, say) for name in asked)])
