"""Dashboards beside `metrics.jsonl`, the record: TensorBoard, Weights & Biases, and Trackio.

A tracker that fails, because its server cannot be reached for example, is left out from then on,
and the run goes on.
"""

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from examples.trainer.runs import processes
from examples.trainer.runs.progress import Observer
from examples.trainer.settings.machines import TrackerName
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.training.evaluate import Evaluation

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


def check(names: Sequence[TrackerName]) -> None:
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
