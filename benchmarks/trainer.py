"""The optimizer's share of a training step, and how runs start: `python -m benchmarks.trainer`.

The step of the trainer in `examples` is timed against forward and backward pass of the same model
alone, in turn in one process. Then whole runs are started, first with an empty cache.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.step import flags
from examples import config as configs
from examples import optimizers, sharding, training
from examples.config import RunConfig
from examples.training import Program, TrainState

Name = Literal["adamw", "muon", "muonplus"]
NAMES: tuple[Name, ...] = ("adamw", "muon", "muonplus")


@dataclasses.dataclass(frozen=True)
class Config:
    """Which steps are measured, and how often."""

    preset: str = "gpt-tiny"
    """Model, of the trainer's presets."""
    vocabulary: int = 2048
    """Tokens that it knows."""
    tokens: tuple[int, ...] = (2048, 8192, 16384)
    """Tokens in a step."""
    rounds: int = 9
    """How often each step is timed."""
    starts: bool = True
    """Also start whole runs."""
    out: Path = Path("benchmarks/results")
    """Folder for the JSON file."""


def main(config: Config) -> None:
    """Measures, prints the tables and writes them with the machine's description as JSON."""
    console = Console(width=max(Console().width, 120))
    base = configs.PRESETS[config.preset][1]
    steps = {str(n): measure(base, config, n, console) for n in config.tokens}
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.trainer", *flags(config)]),
        "machine": machine.describe(),
        "steps": steps,
    }
    show(console, steps)
    if config.starts:
        result["seconds_to_first_step"] = starts(config.preset)
        for which, seconds in result["seconds_to_first_step"].items():
            console.print(f"{which}: {seconds:.1f} s from the start to the end of the first step")
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / f"trainer-{config.preset}-{jax.default_backend()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path}")


def make_program(base: RunConfig, name: Name, vocabulary: int) -> Program:
    """The compiled functions of a run."""
    rule = dataclasses.replace(base.optimizer, name=name)
    mesh = sharding.make_mesh("", jax.devices())
    return training.make_program(base.model, rule, base.steps, 1, vocabulary, mesh)


def measure(base: RunConfig, config: Config, tokens: int, console: Console) -> dict[str, Any]:
    """Seconds and memory of a step with each optimizer, for so many tokens."""
    rows = tokens // base.model.context
    place = sharding.of_batch(sharding.make_mesh("", jax.devices()))
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (2, rows, base.model.context))
    batch = [jax.device_put(part.astype(np.int32), place) for part in ids]
    timed: dict[str, Callable[[], Any]] = {}
    memory = {}
    for name in NAMES:
        program = make_program(base, name, config.vocabulary)
        state = program.init(0)
        if not timed:
            params = program.init(1).params
            gradient = jax.jit(jax.value_and_grad(program.loss))
            timed["forward and backward"] = functools.partial(gradient, params, *batch)
        step: Any = program.train_step  # compiled by jax.jit
        compiled = step.lower(program.abstract, optimizers.Rates(0.0, 0.0), *batch).compile()
        memory[name] = donated(compiled, state)
        timed[name] = Stepper(program, state, batch)
    seconds = machine.interleaved(timed, config.rounds, console)
    alone = seconds["forward and backward"]
    return {
        "forward_and_backward_s": float(np.median(alone)),
        **{
            name: {
                "median_s": float(np.median(seconds[name])),
                "optimizer_share": float(np.median(1 - alone / seconds[name])),
                **memory[name],
            }
            for name in NAMES
        },
    }


@dataclasses.dataclass
class Stepper:
    """A step after the other, each with the state of the one before, whose memory it takes."""

    program: Program
    state: TrainState
    batch: list[jax.Array]

    def __call__(self) -> jax.Array:
        """The loss of the next step."""
        self.state, loss = self.program.train_step(
            self.state, optimizers.Rates(0.01, 0.01), *self.batch
        )
        return loss


def donated(compiled: Any, state: TrainState) -> dict[str, int]:
    """Bytes of the state, and how many of them the step writes where it has read them."""
    memory = compiled.memory_analysis()
    return {
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "in_place_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def starts(preset: str) -> dict[str, float]:
    """Seconds from the start of a run to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        return {which: start(preset, Path(folder), which) for which in ("first run", "second run")}


def start(preset: str, folder: Path, name: str) -> float:
    """The same for one run; `folder` has the caches."""
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
    """The table, in Markdown."""
    table = Table(box=box.MARKDOWN)
    for column in ("tokens", "step", "ms", "optimizer's share", "state MB", "in place", "temp. MB"):
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=True)
    for tokens, row in steps.items():
        alone = f"{1e3 * row['forward_and_backward_s']:.1f}"
        table.add_row(tokens, "forward and backward", alone, *[""] * 4)
        for name in NAMES:
            one = row[name]
            table.add_row(
                tokens,
                name,
                f"{1e3 * one['median_s']:.1f}",
                f"{100 * one['optimizer_share']:.1f}%",
                f"{one['state_bytes'] / 1e6:.1f}",
                f"{100 * one['in_place_bytes'] / one['state_bytes']:.0f}%",
                f"{one['temporary_bytes'] / 1e6:.1f}",
            )
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.trainer", description=__doc__))
