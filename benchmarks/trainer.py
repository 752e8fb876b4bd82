"""The optimizer's share of a training step, and how runs start: `python -m benchmarks.trainer`.

The step of the trainer in `examples` is timed beside the forward and backward pass of the same
model, in turn in one process; then with batches that are read ahead beside one batch that is there
already. Then two whole runs are started, the first with an empty cache of compiled programs.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from benchmarks import records, training_step
from examples.trainer.settings.presets import PRESETS
from examples.trainer.system import tables


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps that are measured, and how often."""

    preset: str = "gpt-tiny"
    """The model: one of the trainer's presets."""
    vocabulary: int = 2048
    """Size of the model's vocabulary."""
    tokens: tuple[int, ...] = (2048, 8192, 16384)
    """Tokens in a step."""
    rounds: int = 9
    """How often each step is timed."""
    starts: bool = True
    """Also measure how soon whole runs take their first step."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    console = Console(width=max(Console().width, 120))
    base = PRESETS[config.preset][1]
    steps = {
        str(tokens): training_step.measure(base, config.vocabulary, tokens, config.rounds, console)
        for tokens in config.tokens
    }
    record = {**records.describe_run("benchmarks.trainer", config), "steps": steps}
    show(console, steps)
    if config.starts:
        record["seconds_to_first_step"] = starts(config.preset)
        for which, seconds in record["seconds_to_first_step"].items():
            console.print(f"{which}: {seconds:.1f} s from the start to the end of the first step")
    name = f"trainer-{config.preset}-{jax.default_backend()}"
    records.write(config.out, name, record, console)


def starts(preset: str) -> dict[str, float]:
    """Seconds from the start of a run to the end of its first step, without and with a cache."""
    with tempfile.TemporaryDirectory() as folder:
        return {which: start(preset, Path(folder), which) for which in ("first run", "second run")}


def start(preset: str, folder: Path, name: str) -> float:
    """The same for one run, whose caches are in ``folder``."""
    runs = ["--runs-dir", str(folder / "runs"), "--name", name]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    metrics = folder / "runs" / name / "metrics.jsonl"
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.train", preset, *runs],
        env=env,
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode}")
            time.sleep(0.02)
        return time.monotonic() - begin
    finally:
        process.kill()
        process.wait()


def show(console: Console, steps: dict[str, Any]) -> None:
    """Prints the table in Markdown, ready for the README."""
    head = ["tokens", "step", "ms", "optimizer's share", "state MB", "in place", "temp. MB"]
    lines = []
    for tokens, row in steps.items():
        alone = f"{1e3 * row['forward_and_backward_s']:.1f}"
        lines.append([tokens, "forward and backward", alone])
        for name in training_step.NAMES:
            one = row[name]
            line = [
                tokens,
                name,
                f"{1e3 * one['median_s']:.1f}",
                f"{100 * one['optimizer_share']:.1f}%",
                f"{one['state_bytes'] / 1e6:.1f}",
                f"{100 * one['in_place_bytes'] / one['state_bytes']:.0f}%",
                f"{one['temporary_bytes'] / 1e6:.1f}",
            ]
            lines.append(line)
    console.out(tables.markdown(head, lines, left=2))
    for tokens, row in steps.items():
        rates = row["tokens_per_second"].items()
        written = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates)
        console.print(
            f"{tokens} tokens a step: tokens/s with the {written}; time with reading over time"
            f" without {row['loading_ratio']:.3f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.trainer", description=__doc__))
