"""Rules for embeddings and heads, in the place of AdamW: `python -m benchmarks.embedding_rules`.

The model of characters and the training are those of `benchmarks.change_one_name`, with Muon on the
matrices. Only the rule of the embedding and of the head differs. Three seeds choose the rate of
each rule, and others answer. `--help` lists the options.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
import tyro

import optax_muonplus as omp
from benchmarks import change_one_name, columns, records
from benchmarks.yardsticks import intervals
from examples.trainer.system import exit_status
from optax_muonplus.baselines import ByPath, TokenNorm
from optax_muonplus.transforms import AdamW

PLAIN = functools.partial(AdamW, nesterov=False)
RULES: dict[str, Callable[..., Any]] = {
    "AdamW": PLAIN,
    "AdamW, Nesterov": AdamW,
    "TokenNorm": TokenNorm,
}
TABLES = "Embed_0/embedding|head/kernel"
COLUMNS = (
    columns.word("embedding and head", "rule"),
    columns.word("rate", "rate"),
    columns.word("nats a character", "loss"),
    columns.word("minus AdamW", "difference"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid, and the rates of all other parameters."""

    rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    """Peak learning rates of the embedding and the head."""
    matrix_rate: float = 0.04
    """Peak learning rate of the matrices, under Muon with Optax's factor."""
    choosing: int = 3
    """Seeds from 0 that choose the rate of each rule."""
    answering: int = 8
    """Seeds after them, which give the answer."""
    steps: int = 300
    """Steps of a run."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Does the runs and prints the table."""
    script = change_one_name.Script(change_one_name.Config(steps=config.steps))
    answers, rates = {}, {}
    for name in RULES:
        looks = {
            rate: run(script, config, name, rate, range(config.choosing)) for rate in config.rates
        }
        rates[name] = min(looks, key=lambda rate: statistics.fmean(looks[rate].values()))
        seeds = range(config.choosing, config.choosing + config.answering)
        answers[name] = run(script, config, name, rates[name], seeds)
    rows = [
        {
            "rule": name,
            "rate": f"{rates[name]:g}",
            "loss": intervals.written(list(found.values()), 4),
            "difference": ""
            if name == "AdamW"
            else intervals.written([x - answers["AdamW"][seed] for seed, x in found.items()], 4),
            "by_seed": found,
        }
        for name, found in answers.items()
    ]
    print(columns.table(rows, COLUMNS))
    described = records.describe_run("benchmarks.embedding_rules", config)
    name = f"embedding-rules-{jax.default_backend()}"
    records.write(config.out, name, {**described, "rows": rows})


def run(
    script: change_one_name.Script, config: Config, name: str, rate: float, seeds: range
) -> dict[int, float]:
    """Trains with each seed; returns the validation losses."""
    decay = script.config.weight_decay
    tables = RULES[name](script.schedule(rate), weight_decay=decay)
    rest = PLAIN(script.schedule(script.config.adam_learning_rate), weight_decay=decay)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        omp.optimizer(
            omp.scale_by_muonplus(norm="none", shape_scale="max"),
            script.schedule(config.matrix_rate),
            weight_decay=decay,
            adamw=ByPath({TABLES: tables}, rest),
            muon_weight_dimension_numbers=script.matrices,
        ),
    )
    losses = {seed: script.train(tx, seed) for seed in seeds}
    print(f"{name}, rate {rate:g}: {statistics.fmean(losses.values()):.4f}")
    return losses


def command_line() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, prog="python -m benchmarks.embedding_rules", description=__doc__)
    return exit_status.run_command(lambda: main(config))


if __name__ == "__main__":
    sys.exit(command_line())
