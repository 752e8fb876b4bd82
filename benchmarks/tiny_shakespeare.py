"""tiny Shakespeare in nats a character: nanoGPT's text, split, model and steps, beside its figure.

The text is `data/tinyshakespeare/input.txt` of karpathy/char-rnn @6f9487a. Published: 1.88, of
karpathy/nanoGPT @23a8e70, README, "I only have a macbook", when the weight decay there was 0.01 and
embeddings had none. A method's second rate, of what is no matrix, and its rate are chosen by seeds
0 to 2; ten others give the answer. Under Muon and Muon+ what is no matrix gets NAdamW, as under
Optax's Muon. The same command goes on after a stop, and several processes share the runs.
"""

import dataclasses
import hashlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from tokenizers import Tokenizer, models

from benchmarks import columns, records
from examples.experiments.sweeps.command_line import NewSweep
from examples.experiments.sweeps.contrasts import estimate
from examples.experiments.sweeps.grid import Grid
from examples.experiments.sweeps.results import Sweep, read
from examples.experiments.sweeps.run import finish
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.rules import Name, Norm
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system import exit_status
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically

NAME = "tiny-shakespeare"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PUBLISHED = 1.88
CHOOSE = 3  # seeds that choose the rate
NANOGPT_RATE, NANOGPT_DECAY = 1e-3, 0.01  # all parameters'; that of matrices but embeddings


class Entry(NamedTuple):
    """A row of the table."""

    optimizer: Name
    shape: Literal["spectral", "max"] = "spectral"
    norm: Norm = "none"
    frobenius: Literal["free", "matched"] = "free"
    tuned: bool = True
    """Whether its rates are; otherwise they are nanoGPT's, as is the decay."""
    nesterov: bool = True
    """Whether Adam's step is Nesterov's."""


ENTRIES = {
    "AdamW as published": Entry("adamw", tuned=False, nesterov=False),
    "AdamW": Entry("adamw", nesterov=False),
    "NAdamW": Entry("adamw"),
    "Muon max": Entry("muon", "max"),
    "RECOMMENDED": Entry("muonplus", "max", "row_col", "matched"),
    "Muon+ col_row": Entry("muonplus", "spectral", "col_row"),
}
BASE = "Muon max"
COLUMNS = (
    columns.word("method", "method"),
    columns.word("rate", "rate"),
    columns.word("second rate", "second"),
    columns.word("nats a character", "nats"),
    columns.word(f"minus {BASE}", "difference"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The text, the grid, and the size of model and training, which is nanoGPT's."""

    text: Path = Path("input.txt")
    """The file of karpathy/char-rnn."""
    only: tuple[str, ...] = tuple(ENTRIES)
    """Rows of the table to run."""
    rates: tuple[float, ...] = (0.0025, 0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04)
    """Peak rates of the matrices under Muon and Muon+: those around the best one are run."""
    adamw_rates: tuple[float, ...] = (0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011)
    """The same under AdamW."""
    second_rates: tuple[float, ...] = (0.002, 0.004, 0.008)
    """Peak rates of what is not a matrix; the first seed chooses one."""
    seeds: int = 13
    """Seeds from 0; those after the first three give the answer."""
    steps: int = 2000
    """Steps of a run."""
    layers: int = 4
    """Blocks of the transformer."""
    width: int = 128
    """Size of a token's vector; four heads divide it."""
    context: int = 64
    """Characters that the model sees."""
    batch_size: int = 12
    """Rows in a step."""
    runs_dir: Path = Path("runs")
    """Folder for the runs, which go on from there."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> int:
    """Does the runs that are missing and prints the table; returns the exit status."""
    if config.seeds < CHOOSE + 2:
        raise UserError(f"--seeds begins at {CHOOSE + 2}: {CHOOSE} choose rates, others answer.")
    folder = config.runs_dir / NAME
    write_tokens(config.text, folder / "text")
    found: dict[str, tuple[float, Sweep]] = {}
    for name in config.only:
        if name not in ENTRIES:
            raise UserError(f"--only {name}: give one of {', '.join(map(repr, ENTRIES))}.")
        found[name] = runs_of(name, ENTRIES[name], config, folder)
    rows = list(rows_of(found))
    print(columns.table(rows, COLUMNS))
    print(f"nanoGPT's README: {PUBLISHED} nats a character, one run, by 240 windows")
    run = records.describe_run("benchmarks.tiny_shakespeare", config)
    records.write(config.out, NAME, {**run, "published": PUBLISHED, "rows": rows})
    return 0


def write_tokens(text: Path, folder: Path) -> None:
    """Writes nanoGPT's train.bin and val.bin, and the tokenizer of its characters."""
    if not text.is_file():
        raise UserError(
            f"{text} does not exist: give data/tinyshakespeare/input.txt of"
            " github.com/karpathy/char-rnn as --text."
        )
    content = text.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(
            f"{text} is another text: its SHA-256 is not {SHA256[:12]}..., and its figures would"
            " not be comparable. Give data/tinyshakespeare/input.txt of karpathy/char-rnn."
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


def runs_of(name: str, entry: Entry, config: Config, folder: Path) -> tuple[float, Sweep]:
    """Does the runs of a row; returns its second rate and its sweep."""
    stem = name.replace(" ", "-").replace("+", "plus").lower()
    if not entry.tuned:
        grid = Grid((entry.optimizer,), adam_rates=(NANOGPT_RATE,), seeds=config.seeds)
        return NANOGPT_RATE, done(stem, entry, NANOGPT_RATE, grid, config, folder)
    rates = config.adamw_rates if entry.optimizer == "adamw" else config.rates
    grid = Grid(
        (entry.optimizer,),
        norms=(entry.norm,),
        frobenius=(entry.frobenius,),
        rates=config.rates,
        adam_rates=config.adamw_rates,
        start=rates[len(rates) // 2],
    )
    looks = {
        second: best_loss(done(f"{stem}-look-{second:g}", entry, second, grid, config, folder))
        for second in config.second_rates
    }
    second = min(looks, key=lambda rate: looks[rate][0])
    grid = dataclasses.replace(grid, seeds=config.seeds, chosen_by=CHOOSE, start=looks[second][1])
    return second, done(f"{stem}-{second:g}", entry, second, grid, config, folder)


def best_loss(found: Sweep) -> tuple[float, float]:
    """The mean loss of the seeds that choose, and the rate that has it."""
    (method,) = found.methods()
    rate = found.best_rate(method)
    losses = found.losses(method, rate)
    return statistics.fmean(losses[seed] for seed in found.choosing_seeds(method)), rate


def done(name: str, entry: Entry, second: float, grid: Grid, config: Config, folder: Path) -> Sweep:
    """Does what is left of a sweep."""
    run = run_config(entry, second, config, folder)
    if status := finish(NewSweep(dataclasses.replace(run, name=name), grid), NAME):
        raise SystemExit(status)
    return read(folder / name)


def run_config(entry: Entry, second: float, config: Config, folder: Path) -> RunConfig:
    """What the runs of a sweep share: as nanoGPT has it, but for windows that do not overlap."""
    text = folder / "text"
    return RunConfig(
        model=ModelConfig(
            n_layer=config.layers,
            n_head=4,
            d_model=config.width,
            context=config.context,
            final_norm="layer",
        ),
        data=DataConfig(source="bin", paths=(str(text),), tokenizer=str(text / "tokenizer.json")),
        optimizer=OptimizerConfig(
            shape_scale=entry.shape,
            adam_learning_rate=second,
            weight_decay=0.1 if entry.tuned else NANOGPT_DECAY,
            adam_b2=0.99,
            adam_nesterov=entry.nesterov,
            schedule="warmup_cosine",
            warmup_share=0.05,
            schedule_floor=0.1,
        ),
        runs_dir=str(folder),
        steps=config.steps,
        batch_size=config.batch_size,
        eval_every=config.steps,
        eval_batches=10**6,  # the whole validation text
        checkpoint_every=10**6,
    )


def rows_of(found: dict[str, tuple[float, Sweep]]) -> Iterator[dict[str, Any]]:
    """A row for each method: rates, nats a character by fresh seed, and paired differences."""
    base = fresh(found[BASE][1]) if BASE in found else {}
    for name, (second, runs) in found.items():
        values = fresh(runs)
        gaps = [values[seed] - base[seed] for seed in values if seed in base]
        (method,) = runs.methods()
        yield {
            "method": name,
            "rate": f"{runs.best_rate(method):g}",
            "second": f"{second:g}",
            "nats": written(list(values.values())),
            "difference": "" if name == BASE or not gaps else written(gaps),
            "nats_by_seed": values,
        }


def fresh(runs: Sweep) -> dict[int, float]:
    """Losses of the seeds that chose nothing; of all rows they are the same."""
    (method,) = runs.methods()
    return {seed: loss for seed, loss in runs.best(method).items() if seed >= CHOOSE}


def written(values: list[float]) -> str:
    """Writes the mean, and the half width of its interval of 95% by Student's distribution."""
    found = estimate(values)
    return f"{found.mean:.4f} ± {found.half_width:.4f}" if len(values) > 1 else f"{found.mean:.4f}"


def command_line() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, prog="python -m benchmarks.tiny_shakespeare", description=__doc__)
    return exit_status.run_command(lambda: main(config))


if __name__ == "__main__":
    sys.exit(command_line())
