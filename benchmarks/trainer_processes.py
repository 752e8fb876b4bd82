"""Processes of the trainer on this machine: how they are started, and what they have written."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.soak import MODEL
from examples.trainer.runs.metrics import read_metrics

STEPS, SAVED = 100, 10
"""Steps of a run, and between checkpoints."""
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
MESSAGES = (
    "error (process",
    "Terminating process because",
    "stopped after step",
    "validation loss ",
)
Process = subprocess.Popen[bytes]


def flags_of(run: Path) -> list[str]:
    """Those that begin a run, or go on with it."""
    if (run / "config.json").exists():
        return ["--resume", str(run)]
    every = ["--steps", str(STEPS), "--checkpoint-every", str(SAVED), "--eval-every", str(STEPS)]
    return [*MODEL.split(), *every, "--runs-dir", str(run.parent), "--name", run.name]


def start(arguments: list[str], log: Path) -> Process:
    """Starts a process of one device, which prints to a file."""
    flags = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": XLA_FLAGS}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **flags},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def free_address() -> str:
    """An address for JAX's coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def log_of(run: Path, what: str, process: int) -> Path:
    """The file of what a process prints."""
    return run.parent / f"{run.name}-{what.replace(' ', '-')}-{process}.log"


def said(logs: Iterable[Path]) -> str:
    """The first line of an error, of the trainer or of JAX, or of a stop."""
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    found = [line for kind in MESSAGES for line in lines if kind in line]
    return found[0] if found else ""


def shortened(message: str) -> str:
    """A message without what stands before it in a log of JAX, and without its last words."""
    return re.sub(r"^[A-Z]\d{4}.*?\] ", "", message)[:90]


def losses(run: Path) -> dict[int, float]:
    """Step to loss."""
    metrics = run / "metrics.jsonl"
    found = read_metrics(metrics) if metrics.exists() else []
    return {record["step"]: record["train_loss"] for record in found if "train_loss" in record}


def last_checkpoint(run: Path) -> int:
    """The step of the last complete checkpoint, 0 without one."""
    return max(
        (int(path.name) for path in run.glob("checkpoints/*") if path.name.isdecimal()), default=0
    )
