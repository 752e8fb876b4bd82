"""Whether the trainer's memory grows in a long run: `python -m benchmarks.soak --steps 30000`.

Trains the smallest model in a process of its own, with many checkpoints, and reads from the kernel
how much memory that process has in use. The first tenth of the run is left out: in it allocators
and caches fill up.
"""

import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

from benchmarks import columns, records

MODEL = (
    "gpt-micro --model.n-layer 1 --model.d-model 16 --model.context 16 --data.vocab-size 300"
    " --sample-tokens 20"
)
PARTS = 10
LIMIT = 5e6
"""Bytes that a run may grow by after its first tenth."""
STEP = re.compile(rb'"step": (\d+)')


@dataclasses.dataclass(frozen=True)
class Config:
    """How long the run is, and what it does beside training."""

    steps: int = 30_000
    """Steps of the run."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    eval_every: int = 500
    """Steps between evaluations."""
    seconds: float = 1.0
    """Time between two looks at the memory."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Runs, and prints the memory in each tenth of the run; ends with status 1 if it grows."""
    with tempfile.TemporaryDirectory() as folder:
        samples = watch(command_of(config, Path(folder)), Path(folder, "soak"), config.seconds)
    rows = tenths(samples, config.steps)
    growth = growth_of(rows)
    record = {
        **records.describe_run("benchmarks.soak", config),
        "tenths": rows,
        "growth_bytes": growth,
    }
    print(columns.table(rows, COLUMNS))
    print(f"grown by {growth / 1e6:+.1f} MB after the first tenth")
    records.write(config.out, "soak", record)
    if growth > LIMIT:
        sys.exit(1)


def command_of(config: Config, folder: Path) -> list[str]:
    """The command of the run, whose folder is ``folder/soak``."""
    every = ["--checkpoint-every", str(config.checkpoint_every)]
    every += ["--eval-every", str(config.eval_every), "--steps", str(config.steps)]
    place = ["--runs-dir", str(folder), "--name", "soak"]
    return [sys.executable, "-m", "examples.train", *MODEL.split(), *every, *place]


def watch(command: list[str], run: Path, seconds: float) -> list[dict[str, float]]:
    """Runs a command; its memory at the steps that the run has written, until it ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[dict[str, float]] = []
    try:
        while process.poll() is None:
            time.sleep(seconds)
            memory, step = memory_of(process.pid), last_step(run / "metrics.jsonl")
            if memory and step:
                samples.append({"step": step, **memory})
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}")
    return samples


def memory_of(process: int) -> dict[str, float]:
    """Resident bytes of a process, in all and of its own; empty if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return {}
    found = dict(re.findall(r"(VmRSS|RssAnon|Threads):\s+(\d+)", status))
    if "VmRSS" not in found:
        return {}
    return {
        "resident": 1024 * int(found["VmRSS"]),
        "anonymous": 1024 * int(found["RssAnon"]),
        "threads": int(found["Threads"]),
    }


def last_step(metrics: Path) -> int:
    """The last step in a file of measurements, 0 without one; reads only the end of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
        found = STEP.findall(file.read())
    return int(found[-1]) if found else 0


def tenths(samples: list[dict[str, float]], steps: int) -> list[columns.Row]:
    """Medians of each tenth of the run; raises `RuntimeError` where a tenth has no sample."""
    rows = []
    for part in range(PARTS):
        first, last = part * steps // PARTS, (part + 1) * steps // PARTS
        # Without the last step, after which the run makes a sample of text and a picture.
        inside = [sample for sample in samples if first <= sample["step"] < last]
        if not inside:
            raise RuntimeError(f"no sample from step {first} to {last}: give fewer --seconds")
        medians = {name: statistics.median(s[name] for s in inside) for name in inside[0]}
        largest = max(sample["resident"] for sample in inside)
        rows.append({**medians, "step": last, "largest": largest, "samples": len(inside)})
    return rows


def growth_of(rows: list[columns.Row]) -> float:
    """Bytes from the second tenth of a run to its last."""
    return rows[-1]["resident"] - rows[1]["resident"]


COLUMNS = (
    columns.number("up to step", "step", 0),
    columns.number("resident MB", "resident", 1, 1e6),
    columns.number("at most", "largest", 1, 1e6),
    columns.number("anonymous MB", "anonymous", 1, 1e6),
    columns.number("threads", "threads", 0),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.soak", description=__doc__))
