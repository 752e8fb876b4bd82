"""What can happen to a run of the trainer: files that are damaged, disks that fill, signals."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.trainer import TOY

LIMIT = 120.0  # seconds after which a process counts as hanging
LAST = 24
SAVED = 16  # steps of the run that attacks copy


@dataclasses.dataclass
class Scene:
    """A checkout of the trainer, a finished run of it, and a place for copies of the run."""

    checkout: Path
    room: Path
    random: random.Random
    base: Path | None = None
    copies: int = 0

    @property
    def text(self) -> Path:
        return self.room / "own.txt"

    def start(self, *flags: str, **variables: str) -> subprocess.Popen[str]:
        """Starts the trainer."""
        environment = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONPATH": str(self.checkout),
            "XDG_CACHE_HOME": str(self.room / "cache"),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "examples.train", *flags],
            cwd=self.checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A background shell ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def new(self, root: Path, name: str = "x", *flags: str) -> list[str]:
        """The flags of a new run."""
        paths = ["--data.paths", str(self.text), "--runs-dir", str(root), "--name", name]
        return [*TOY, *paths, *flags]

    def stopped(self, root: Path | None = None) -> Path:
        """A run that has 8 of its 24 steps left."""
        assert self.base is not None
        self.copies += 1
        folder = (root or self.room / f"copy-{self.copies}") / "x"
        shutil.copytree(self.base, folder)
        shutil.rmtree(folder / "checkpoints" / str(LAST))
        path = folder / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [record for record in records if record["step"] <= SAVED]
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        return folder


def losses(folder: Path) -> dict[int, float]:
    """The training losses of a run; empty where the file cannot be read."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        return {r["step"]: r["train_loss"] for r in records if "train_loss" in r}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def outcome(process: subprocess.Popen[str], folder: Path, base: Path | None) -> tuple[str, str]:
    """How a process ended, in a word, and the line of its output that says most."""
    try:
        shown, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        shown, _ = process.communicate()
        return "hangs", last_line(shown)
    if "Traceback" in shown or "Event loop is closed" in shown or "Exception" in shown:
        return "traceback", last_line(shown)
    if process.returncode == 2 and "error" in shown:
        return "sentence", shown[shown.rindex("error") :].splitlines()[0]
    if process.returncode in (130, 143, -signal.SIGINT, -signal.SIGKILL):
        return "stopped", last_line(shown)
    if process.returncode:
        return f"status {process.returncode}", last_line(shown)
    if base is not None and losses(folder) != losses(base):
        return "other losses", last_line(shown)
    return "finished", last_line(shown)


def last_line(shown: str) -> str:
    """The last line that is not empty."""
    return ([line for line in shown.splitlines() if line.strip()] or [""])[-1]


@contextlib.contextmanager
def disk(room: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory; only root can make one."""
    place = room / f"disk-{random.randrange(1 << 30)}"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Takes all the space that is left."""
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with contextlib.suppress(OSError), (place / "filler-2").open("wb", buffering=0) as file:
        while file.write(b"x"):
            pass


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Waits until something has happened or the process has ended; whether it has happened."""
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.002)
    return happened()
