"""The optimizer's share of a training step, and how runs start: `python -m benchmarks.trainer`.

The step of the trainer in `examples` and the forward and backward pass of the same model are timed
in turn in one process; then a step with batches that are read ahead, and with one batch that is
there already. Then two whole runs are started, the first with an empty cache of compiled programs.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import tyro

from benchmarks import columns, records, training_step
from examples.trainer.settings.presets import PRESETS


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
    if config.preset not in PRESETS:
        raise SystemExit(f"There is no preset {config.preset}. Presets are {', '.join(PRESETS)}.")
    base = PRESETS[config.preset][1]
    steps = {
        str(tokens): training_step.measure(base, config.vocabulary, tokens, config.rounds)
        for tokens in config.tokens
    }
    record = {**records.describe_run("benchmarks.trainer", config), "steps": steps}
    print(columns.table(rows_of(steps), COLUMNS, left=2))
    for tokens, row in steps.items():
        rates = row["tokens_per_second"].items()
        written = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates)
        print(
            f"{tokens} tokens a step: tokens/s with the {written}; time with reading over time"
            f" without {row['loading_ratio']:.3f}"
        )
    if config.starts:
        record["seconds_to_first_step"] = starts(config.preset)
        for which, seconds in record["seconds_to_first_step"].items():
            print(f"{which}: {seconds:.1f} s from the start to the end of the first step")
    records.write(config.out, f"trainer-{config.preset}-{jax.default_backend()}", record)


def starts(preset: str) -> dict[str, float]:
    """Measures how soon runs end their first step, without and with a cache of programs."""
    with tempfile.TemporaryDirectory() as folder:
        return {which: start(preset, Path(folder), which) for which in ("first run", "second run")}


def start(preset: str, folder: Path, name: str) -> float:
    """Measures seconds from the start of a run to its first step; caches are in ``folder``."""
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


def rows_of(steps: dict[str, Any]) -> Iterator[columns.Row]:
    """Lists the rows of the table."""
    for tokens, row in steps.items():
        alone = row["forward_and_backward_s"]
        yield {"tokens": tokens, "step": "forward and backward", "median_s": alone}
        for name in training_step.NAMES:
            in_place = row[name]["in_place_bytes"] / row[name]["state_bytes"]
            yield {"tokens": tokens, "step": name, "in_place": in_place, **row[name]}


def percent(heading: str, key: str, digits: int) -> columns.Column:
    """Makes a column of shares in percent, empty where a row has none."""
    return heading, lambda row: f"{100 * row[key]:.{digits}f}%" if key in row else ""


COLUMNS = (
    columns.word("tokens", "tokens"),
    columns.word("step", "step"),
    columns.number("ms", "median_s", 1, 1e-3),
    percent("optimizer's share", "optimizer_share", 1),
    columns.number("state MB", "state_bytes", 1, 1e6),
    percent("in place", "in_place", 0),
    columns.number("temp. MB", "temporary_bytes", 1, 1e6),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.trainer", description=__doc__))
