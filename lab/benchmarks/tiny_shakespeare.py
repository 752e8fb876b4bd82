"""tiny Shakespeare in nats a character: nanoGPT's text, split, model and steps, beside its figure.

The text is `data/tinyshakespeare/input.txt` of karpathy/char-rnn @6f9487a. Published: 1.88, of
karpathy/nanoGPT @23a8e70, README, "I only have a macbook", when the weight decay there was 0.01 and
embeddings had none. Each row has the rates that seeds 0 to 2 chose from a grid
(`lab/results/benchmarks/yardsticks`), and ten other seeds answer. Under Muon and Muon+ other
parameters get NAdamW, as under Optax's Muon. After a stop the same command continues, and several
processes share the runs.
"""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from tokenizers import Tokenizer, models

from examples.trainer.settings.run import (
    DataConfig,
    ModelConfig,
    Name,
    Norm,
    OptimizerConfig,
    RunConfig,
)
from examples.trainer.system.errors import UserError, run_command
from examples.trainer.system.files import write_atomically
from lab.benchmarks import columns, records
from lab.sweeps.command_line import NewSweep
from lab.sweeps.contrasts import estimate
from lab.sweeps.grid import Grid
from lab.sweeps.results import read
from lab.sweeps.run import finish

NAME = "tiny-shakespeare"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PUBLISHED = 1.88
CHOSE = 3  # seeds that chose the rates


class Entry(NamedTuple):
    """A row of the table: peak rates of the matrices and of the rest, and how it differs."""

    optimizer: Name
    rate: float
    second: float
    norm: Norm = "row_col"
    frobenius: Literal["free", "matched"] = "matched"
    shape: Literal["spectral", "max"] = "max"
    decay: float = 0.1
    nesterov: bool = True


ENTRIES = {
    "AdamW as published": Entry("adamw", 0.001, 0.001, decay=0.01, nesterov=False),
    "AdamW": Entry("adamw", 0.004, 0.004, nesterov=False),
    "Muon": Entry("muon", 0.014, 0.008),
    "Muon+": Entry("muonplus", 0.01, 0.008),
    "Muon+ col_row": Entry("muonplus", 0.01, 0.008, "col_row", "free", "spectral"),
}
BASE = "Muon"
COLUMNS = (
    columns.word("method", "method"),
    columns.word("nats a character", "nats"),
    columns.word(f"minus {BASE}", "difference"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The text and the rows."""

    text: Path = Path("input.txt")
    """The file of karpathy/char-rnn."""
    only: tuple[str, ...] = tuple(ENTRIES)
    """Rows of the table to run."""
    seeds: int = 10
    """How many, from 3."""
    steps: int = 2000
    """Steps of a run."""
    runs_dir: Path = Path("runs")
    """Folder for the runs, which continue from there."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> int:
    """Does the runs that are missing and prints the table; returns the exit status."""
    if unknown := sorted({*config.only} - {*ENTRIES}):
        raise UserError(f"--only {unknown[0]}: give one of {', '.join(map(repr, ENTRIES))}.")
    folder = config.runs_dir / NAME
    write_tokens(config.text, folder / "text")
    found: dict[str, dict[int, float]] = {}
    for name in config.only:
        asked = sweep_of(name, config, folder)
        if status := finish(asked, NAME):
            return status
        sweep = read(folder / asked.config.name)
        found[name] = sweep.best(*sweep.methods())
    rows = [row_of(name, losses, found.get(BASE, {})) for name, losses in found.items()]
    print(columns.table(rows, COLUMNS))
    print(f"nanoGPT's README: {PUBLISHED} nats a character, one run, by 240 windows")
    run = records.describe_run("lab.benchmarks.tiny_shakespeare", config)
    records.write(config.out, NAME, {**run, "published": PUBLISHED, "rows": rows})
    return 0


def write_tokens(text: Path, folder: Path) -> None:
    """Writes nanoGPT's train.bin and val.bin, and the tokenizer of its characters."""
    content = text.read_bytes() if text.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(
            f"{text} is missing or another text: its SHA-256 is not {SHA256[:12]}..., and figures"
            " would not be comparable. Give data/tinyshakespeare/input.txt of"
            " github.com/karpathy/char-rnn as --text."
        )
    write_split(content.decode(), folder)


def write_split(text: str, folder: Path) -> None:
    """Numbers the characters in their order, and holds out the last tenth."""
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = np.array([numbers[character] for character in text], "<u2")
    folder.mkdir(parents=True, exist_ok=True)
    cut = int(len(text) * 0.9)
    write_atomically(folder / "train.bin", ids[:cut].tobytes())
    write_atomically(folder / "val.bin", ids[cut:].tobytes())
    encoder = Tokenizer(models.WordLevel(numbers, unk_token=next(iter(numbers))))
    write_atomically(folder / "tokenizer.json", encoder.to_str().encode())


def sweep_of(name: str, config: Config, folder: Path) -> NewSweep:
    """The runs of a row: as in nanoGPT, except for windows that do not overlap."""
    entry, text = ENTRIES[name], folder / "text"
    grid = Grid(
        (entry.optimizer,),
        norms=(entry.norm,),
        frobenius=(entry.frobenius,),
        rates=(entry.rate,),
        adam_rates=(entry.rate,),
        first_seed=CHOSE,
        seeds=config.seeds,
    )
    run = RunConfig(
        name=name.replace(" ", "-").replace("+", "plus").lower(),
        model=ModelConfig(n_layer=4, n_head=4, d_model=128, context=64, final_norm="layer"),
        data=DataConfig(source="bin", paths=(str(text),), tokenizer=str(text / "tokenizer.json")),
        optimizer=OptimizerConfig(
            shape_scale=entry.shape,
            adam_learning_rate=entry.second,
            weight_decay=entry.decay,
            adam_b2=0.99,
            adam_nesterov=entry.nesterov,
            schedule="warmup_cosine",
            warmup_share=0.05,
            schedule_floor=0.1,
        ),
        runs_dir=str(folder),
        steps=config.steps,
        batch_size=12,
        eval_every=config.steps,
        eval_batches=10**6,  # the whole validation text
        checkpoint_every=10**6,
    )
    return NewSweep(run, grid)


def row_of(name: str, losses: dict[int, float], base: dict[int, float]) -> dict[str, Any]:
    """Makes a row: nats a character by seed, and paired differences."""
    gaps = [losses[seed] - base[seed] for seed in losses if seed in base]
    difference = "" if name == BASE or not gaps else written(gaps)
    nats = written(list(losses.values()))
    return {"method": name, "nats": nats, "difference": difference, "nats_by_seed": losses}


def written(values: list[float]) -> str:
    """Writes the mean, and the half width of its interval of 95% by Student's distribution."""
    found = estimate(values)
    return f"{found.mean:.4f} ± {found.half_width:.4f}" if len(values) > 1 else f"{found.mean:.4f}"


def command_line() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, prog="python -m lab.benchmarks.tiny_shakespeare", description=__doc__)
    return run_command(lambda: main(config))


if __name__ == "__main__":
    sys.exit(command_line())
