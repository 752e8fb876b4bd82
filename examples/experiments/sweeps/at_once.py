"""The runs of a sweep at once, in one program: `python -m examples.experiments.sweeps.at_once`.

A small model fills a small part of a GPU, and a step of it takes the time of its kernels' launches.
Here `jax.vmap` computes the steps of all runs of a method together, which differ in rate and seed,
and a `jax.lax.scan` does all steps between two evaluations, with the text in the GPU's memory. The
flags and the ledger are those of `python -m examples.sweep`, and so are the runs: each has its own
initial parameters and its own order of the text. All rates are run with all seeds, since the best
is known at the end; the ledger has those that `examples.sweep` would have done. A method whose runs
are stopped begins again, since nothing is saved before its end.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.experiments.sweeps import command_line, grid
from examples.experiments.sweeps.command_line import NewSweep
from examples.experiments.sweeps.grid import Method, Trial
from examples.experiments.sweeps.ledger import Ledger, Result, smooth
from examples.experiments.sweeps.run import begin
from examples.trainer.data.loader import loader_of, positions
from examples.trainer.data.token_folder import Dataset
from examples.trainer.runs.recorder import MAX_SKIPPED
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import exit_status
from examples.trainer.system.errors import UserError
from examples.trainer.training import evaluate, optimizers, sharding
from examples.trainer.training.loss import NO_TARGET
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.program import Program, make_setup


class Programs(NamedTuple):
    """The compiled functions of some runs."""

    init: Callable[[Any], Any]
    """Seeds (runs,) to states, each with an axis of the runs in front."""
    steps: Callable[..., Any]
    """States, rates, text and starts (steps, runs, rows) to states and losses (steps, runs)."""
    losses: Callable[..., Any]
    """Parameters, text, starts and which rows count (batches, rows) to losses (batches, runs)."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return exit_status.run_command(lambda: finish(*command_line.parse(argv)))


def finish(asked: NewSweep, preset: str) -> int:
    """Does what is left of a grid, a method at a time; returns the exit status."""
    if asked.mesh:
        raise UserError("--mesh: runs at once do not have this. Take python -m examples.sweep.")
    dataset, _, ledger = begin(asked, preset, print)
    for method in grid.methods(asked.grid):
        if any(trial not in ledger.losses() for trial in wanted(asked, method, ledger.losses())):
            rates, seeds = grid.rates(asked.grid, method), grid.all_seeds(asked.grid)
            trials = [Trial(method, rate, seed) for rate in rates for seed in seeds]
            print(f"{method.name}: {len(trials)} runs at once", flush=True)
            record(asked, ledger, dict(zip(trials, run(asked, trials, dataset), strict=True)))
    return 0


def wanted(asked: NewSweep, method: Method, losses: dict[Trial, float]) -> list[Trial]:
    """The runs of a method that `python -m examples.sweep` would do."""
    return [trial for trial in grid.wanted(asked.grid, losses) if trial.method == method]


def record(asked: NewSweep, ledger: Ledger, found: dict[Trial, Result]) -> None:
    """Adds the runs of a method that belong into the ledger, and are not there yet."""
    method = next(iter(found)).method
    losses = {trial: result.loss for trial, result in found.items()}
    for trial in wanted(asked, method, losses):
        if trial not in ledger.losses():
            ledger.add(trial, found[trial])
            print(f"{trial.name}  {found[trial].loss:.4f}", flush=True)


def run(asked: NewSweep, trials: Sequence[Trial], dataset: Dataset) -> list[Result]:
    """Trains runs of one method, and returns their results in order."""
    started = time.monotonic()
    configs = [grid.configure(asked.config, asked.grid, trial, "") for trial in trials]
    config, mesh = configs[0], sharding.make_mesh("", jax.devices()[:1])
    programs = make_programs(make_setup(config, dataset, mesh).program, config.model.context)
    text, held_out = (jnp.asarray(x[:]) for x in (dataset.train.ids, dataset.val.ids))
    order, n_batches = evaluate.batches(config, dataset.val)
    of_val = starts(order, range(n_batches))
    counts = np.arange(of_val.size).reshape(of_val.shape) < order.n_windows
    full = counts.sum() / order.batch_size  # a part of the last batch counts
    of_each = [optimizers.rates(each.optimizer) for each in configs]
    rates = jax.tree.map(lambda *x: jnp.asarray(x), *of_each)
    states = programs.init(jnp.asarray([each.seed for each in configs]))
    ends = [*range(config.eval_every, config.steps, config.eval_every), config.steps]
    val: list[np.ndarray] = []
    train: list[np.ndarray] = []
    chosen = starts_of_runs(dataset, configs, range(ends[0]))
    for end, next_end in zip(ends, [*ends[1:], config.steps], strict=True):
        states, losses = programs.steps(states, rates, text, chosen)
        evaluated = programs.losses(states.params, held_out, of_val, counts)
        chosen = starts_of_runs(dataset, configs, range(end, next_end))  # while the device computes
        train.append(np.asarray(losses))
        val.append(np.asarray(evaluated, np.float64).sum(axis=0) / full)
        print(f"  {end} steps, {time.monotonic() - started:.0f} s: {val[-1].round(4)}", flush=True)
    each_s = (time.monotonic() - started) / len(trials)
    curves, evaluations = np.concatenate(train).T, np.array(val).T
    return [
        result_of(curve, list(zip(ends, losses.tolist(), strict=True)), config, dataset, each_s)
        for curve, losses in zip(curves, evaluations, strict=True)
    ]


def result_of(
    train: np.ndarray,
    val: list[tuple[int, float]],
    config: RunConfig,
    dataset: Dataset,
    seconds: float,
) -> Result:
    """The result of one run, from its training losses (steps,) and its evaluations.

    It diverged where the trainer stops: at one skipped step in a row more than it may have.
    """
    skipped, most = ~np.isfinite(train), MAX_SKIPPED + 1
    in_a_row = np.convolve(skipped, np.ones(most))[: len(train)]  # of the last `most` steps
    diverged_at = next((int(i) + 1 for i in np.flatnonzero(in_a_row == most)), None)
    end = len(train) + 1 if diverged_at is None else diverged_at
    size, bits = dataset.val.meta, None
    if diverged_at is None:
        bits = evaluate.bits_per_byte(val[-1][1], size.tokens, size.bytes)
    return Result(
        val=[(step, loss) for step, loss in val if step < end],
        train=smooth([(int(i) + 1, float(train[i])) for i in np.flatnonzero(~skipped[: end - 1])]),
        bits_per_byte=bits,
        diverged_at=diverged_at,
        seconds=round(seconds, 1),
    )


def make_programs(program: Program, context: int) -> Programs:
    """The functions of one run, mapped over runs and repeated over steps."""
    together = jax.vmap(program.train_step)

    def windows(text: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        offsets = jnp.expand_dims(jnp.arange(context + 1), range(starts.ndim))
        read = text[starts[..., None] + offsets].astype(jnp.int32)
        return read[..., :-1], read[..., 1:]

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(states: Any, rates: Rates, text: jax.Array, starts: jax.Array) -> Any:
        def step(states: Any, starts: jax.Array) -> Any:
            states, measured = together(states, rates, *windows(text, starts))
            return states, measured.loss

        return jax.lax.scan(step, states, starts)

    @jax.jit
    def losses(params: Any, text: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
        each = jax.vmap(program.loss, (0, None, None))

        def batch(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
            inputs, targets = windows(text, rows[0])
            return each(params, inputs, jnp.where(rows[1][:, None], targets, NO_TARGET))

        return jax.lax.map(batch, (starts, counts))

    return Programs(jax.jit(jax.vmap(program.init)), steps, losses)


def starts_of_runs(dataset: Dataset, configs: Sequence[RunConfig], steps: range) -> np.ndarray:
    """Where the windows of steps begin in the text, (steps, runs, rows)."""
    orders = {config.seed: loader_of(config, dataset) for config in configs}
    of_seed = {seed: starts(order, steps) for seed, order in orders.items()}
    return np.stack([of_seed[config.seed] for config in configs], axis=1)


def starts(order: Any, steps: range) -> np.ndarray:
    """Where the windows of a loader's batches begin, (steps, rows)."""
    places = np.array([positions(step, order.batch_size, None) for step in steps], np.int64)
    chosen = order.indices(places.ravel()) * order.context
    return chosen.astype(np.int32).reshape(len(steps), order.batch_size)


if __name__ == "__main__":
    exit_status.leave(main(sys.argv[1:]))
