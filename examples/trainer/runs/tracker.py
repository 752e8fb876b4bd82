"""Dashboards beside `metrics.jsonl`: TensorBoard, and Weights & Biases."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from examples.trainer.settings.run import RunConfig, TrackerName
from examples.trainer.system.errors import load_package


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
