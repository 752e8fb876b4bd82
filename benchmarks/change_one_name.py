"""A script tuned for Optax's Muon, with one name changed: `python -m benchmarks.change_one_name`.

A small model in Flax Linen, of characters or with `--task` of digits, is trained with a
`TrainState`, warm-up, cosine, clipping and weight decay. Only the name of the optimizer differs: in
a seed all methods have the same initial parameters and the same batches. With `--out` the JSON file
is written after each run, and a second start does what is missing there. `--help` lists options.
"""

import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from flax.training.train_state import TrainState

import optax_muonplus as omp
from benchmarks import character_model, digit_models, parity, rate_curves, records
from benchmarks.rate_curves import Losses, Run
from examples.trainer.system import exit_status
from examples.trainer.system.errors import UserError

ADAMW, BEFORE = "optax.adamw", "optax.contrib.muon"
PLAIN = "optax.contrib.muon, by itself"  # its own choice of matrices: every leaf of two axes
PLUS, SAME = "omp.muonplus", "omp.muon, Optax's update"
PAPER = f"{PLUS}, PAPER"
MUONS: dict[str, Callable[..., optax.GradientTransformation]] = {
    BEFORE: optax.contrib.muon,
    PLAIN: optax.contrib.muon,
    PLUS: omp.muonplus,  # no options, because a user gives none
    PAPER: functools.partial(omp.muonplus, **omp.PAPER),
    SAME: functools.partial(omp.muon, **parity.AS_OPTAX),
}
OF_TEXT = (BEFORE, ADAMW, PLUS, PAPER, SAME)
OF_DIGITS = (BEFORE, PLAIN, ADAMW, PLUS, PAPER)
RATE = "peak learning rate of the matrices (optax.adamw: of all parameters)"
LEAST = {"rates": 1e-9, "adamw_rates": 1e-9, "seeds": 0} | dict.fromkeys(
    ("steps", "batch_size", "context", "layers", "width", "heads"), 1
)
NOT_OF_A_RUN = {"rates", "adamw_rates", "seeds", "picture"}  # options that change no loss


@dataclasses.dataclass(frozen=True)
class Config:
    """The model, its training, and the grid."""

    task: Literal["text", "mlp", "cnn", "vit"] = "text"
    """Characters of Python's standard library, or a network for scikit-learn's digits."""
    rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08)
    """Peak learning rates of the matrices."""
    adamw_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.02, 0.03)
    """Peak learning rates of optax.adamw."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the initial parameters and of the batches."""
    steps: int = 300
    """Steps of a run; the first tenth of them is the warm-up."""
    batch_size: int = 32
    """Windows of text, or images, in a step."""
    context: int = 64
    """Characters that the model of text sees."""
    layers: int = 2
    """Blocks of the model of text."""
    width: int = 96
    """Size of a character's vector."""
    heads: int = 4
    """Attention heads of the model of text; they divide the width."""
    adam_learning_rate: float = 3e-3
    """Peak learning rate of what is not a matrix, for all optimizers but optax.adamw."""
    weight_decay: float = 0.1
    """Of the matrices and of the rest."""
    picture: Literal["none", "png", "svg"] = "none"
    """Form of the picture of loss against rate, which is written to the folder of --out."""
    out: Path | None = None
    """Folder for the runs, the JSON file and the picture; nothing is written without it."""


def main(config: Config) -> None:
    """Does the runs that are missing; prints the tables and writes all figures as JSON."""
    check(config)
    losses = measure(config)
    print(rate_curves.rate_by_rate(losses, BEFORE))
    print(rate_curves.best_against_best(losses, BEFORE))
    if config.out is not None and config.picture != "none":
        rate_curves.draw(losses, config.out / f"{file_name(config)}.{config.picture}", RATE)


def file_name(config: Config) -> str:
    """Names the JSON file and the picture, without their endings."""
    task = "" if config.task == "text" else f"{config.task}-"
    return f"change-one-name-{task}{jax.default_backend()}"


def check(config: Config) -> None:
    """Refuses options that leave nothing to train or compare."""
    for name, least in LEAST.items():
        given = np.ravel(getattr(config, name))
        if not given.size or not np.all((given >= least) & (given < math.inf)):
            option, numbers = name.replace("_", "-"), " ".join(map(str, given)) or "nothing"
            raise UserError(f"--{option} is {numbers}: give {least:g} or more.")
    if config.width % config.heads:
        raise UserError(f"--heads {config.heads} does not divide --width {config.width}: it must.")


def measure(config: Config) -> Losses:
    """Finds the validation loss of every run, in the order of the grid."""
    grid = [
        Run(method, rate, seed)
        for method in (OF_TEXT if config.task == "text" else OF_DIGITS)
        for rate in (config.adamw_rates if method == ADAMW else config.rates)
        for seed in config.seeds
    ]
    losses = kept(config)
    missing = [run for run in grid if run not in losses]
    print(f"{len(missing)} of {len(grid)} runs are to be done")
    script = Script(config)
    for (method, rate), group in itertools.groupby(missing, lambda run: (run.method, run.rate)):
        tx = script.optimizer(method, rate)  # one object, so that seeds share what is compiled
        for run in group:
            losses[run] = script.train(tx, run.seed)
            print(f"{method}, rate {rate:g}, seed {run.seed}: {losses[run]:.4f}")
            keep(config, losses, said=False)
    keep(config, losses)  # with those of an earlier start that are not in this grid
    return {run: losses[run] for run in grid}


def keep(config: Config, losses: Losses, said: bool = True) -> None:
    """Writes the losses; JSON has no infinity, so that null stands for it."""
    rows = [
        {**run._asdict(), "validation_loss": loss if math.isfinite(loss) else None}
        for run, loss in losses.items()
    ]
    run = records.describe_run("benchmarks.change_one_name", config)
    records.write(config.out, file_name(config), {**run, "rows": rows}, said)


def kept(config: Config) -> Losses:
    """Reads the losses that an earlier start has written with the same options and machine."""
    path = (config.out or Path()) / f"{file_name(config)}.json"
    if config.out is None or not path.exists():
        return {}
    now = records.describe_run("benchmarks.change_one_name", config)
    try:
        before = json.loads(path.read_text())
        if any(of_a_run(before[name]) != of_a_run(now[name]) for name in ("config", "machine")):
            return {}
        rows = {
            Run(*(row[x] for x in Run._fields)): row["validation_loss"] for row in before["rows"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has no losses of runs ({error!r}): move it away.") from None
    return {run: math.inf if loss is None else loss for run, loss in rows.items()}


def of_a_run(options: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the options that change no loss; tuples as JSON has them."""
    return json.loads(json.dumps({k: x for k, x in options.items() if k not in NOT_OF_A_RUN}))


class Script:
    """The user's script, as functions of the optimizer and the seed."""

    def __init__(self, config: Config):
        self.config = config
        if config.task == "text":
            sizes = (config.context, config.layers, config.width, config.heads)
            self.task = character_model.Task(config.steps, config.batch_size, sizes)
        else:
            self.task = digit_models.Task(config.task, config.steps, config.batch_size)
        self.init = jax.jit(self.task.model.init)
        # Without them Optax takes embeddings and the head, which have two axes, for matrices too,
        # and no attention kernel or convolution, which have three and four.
        self.matrices = omp.muon_dimension_numbers(self.parameters(seed=0))

    def optimizer(self, method: str, rate: float) -> optax.GradientTransformation:
        """Clipping, and the optimizer with the arguments that all methods share."""
        config, schedule = self.config, self.schedule
        if method == ADAMW:
            tx = optax.adamw(schedule(rate), weight_decay=config.weight_decay)
        else:
            tx = MUONS[method](
                schedule(rate),
                weight_decay=config.weight_decay,
                adam_learning_rate=schedule(config.adam_learning_rate),
                adam_weight_decay=config.weight_decay,
                muon_weight_dimension_numbers=None if method == PLAIN else self.matrices,
            )
        return optax.chain(optax.clip_by_global_norm(1.0), tx)

    def schedule(self, peak: float) -> optax.Schedule:
        """From zero to the peak in a tenth of the steps, and back along a cosine."""
        steps = self.config.steps
        return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)

    def parameters(self, seed: int) -> Any:
        """The initial parameters."""
        return self.init(jax.random.key(seed), self.task.example)["params"]

    def train(self, tx: optax.GradientTransformation, seed: int) -> float:
        """Validation loss after the last step; infinite if it is not a number."""
        task = self.task
        state = TrainState.create(apply_fn=task.model.apply, params=self.parameters(seed), tx=tx)
        for batch in task.batches(seed):
            state = task.train_step(state, batch)
        loss = float(task.evaluate(state, task.validation))
        return loss if math.isfinite(loss) else math.inf


def command_line() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, prog="python -m benchmarks.change_one_name", description=__doc__)
    return exit_status.run_command(lambda: main(config))


if __name__ == "__main__":
    sys.exit(command_line())
