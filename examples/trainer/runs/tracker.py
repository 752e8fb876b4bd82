"""Dashboards beside `metrics.jsonl`: TensorBoard, and Weights & Biases."""

import dataclasses
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.trainer.settings.machines import TrackerName
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import load_package

PACKAGES: dict[TrackerName, str] = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def package_of(name: TrackerName) -> Any:
    return load_package(PACKAGES[name], f"--tracker {name}", name)


class Tracker:
    """Gives the figures of a run to a dashboard. One that fails is left out; the run goes on."""

    def __init__(
        self, name: TrackerName, folder: Path, config: RunConfig, say: Callable[[str], None]
    ):
        self.name, self.folder, self.config, self.say = name, folder, config, say
        self.package: Any = package_of(name)

    def begin(self, step: int) -> None:
        self.attempt(self.start, step)

    def start(self, step: int) -> None:
        if self.name == "tensorboard":
            # TensorBoard hides what an earlier process wrote of the steps that come again.
            place = str(self.folder / "tensorboard")
            self.package = self.package.SummaryWriter(place, purge_step=step + 1)
            return
        own = self.folder / "tracker_id"  # of this run, wherever its folder is moved
        if not own.exists():
            own.write_text(secrets.token_hex(8))
        project = os.environ.get("WANDB_PROJECT", "optax_muonplus")
        again = {"id": own.read_text(), "resume": "allow", "dir": str(self.folder)}
        self.package.init(
            project=project, name=self.folder.name, config=dataclasses.asdict(self.config), **again
        )

    def record(self, step: int, figures: dict[str, Any]) -> None:
        self.attempt(self.log, step, figures)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        if self.name == "wandb":
            self.package.log(figures, step=step)
            return
        for name, value in figures.items():
            self.package.add_scalar(name, value, step)

    def close(self) -> None:
        self.attempt(lambda: getattr(self.package, "finish" if self.name == "wandb" else "close")())

    def attempt(self, work: Callable[..., Any], *given: Any) -> None:
        try:
            if self.package is not None:
                work(*given)
        except Exception as error:  # of the network, the disk, the package: no common class
            self.package = None
            self.say(f"--tracker {self.name} is left out from here on: {error}")
