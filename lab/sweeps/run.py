"""Does the runs of a sweep, each in a folder of its own.

Finished runs are skipped, a run that was stopped continues from its checkpoint, and several
processes with the same command share the work. Runs that differ only in rates or seed use one
compiled program.
"""

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from jax.sharding import Mesh
from rich.console import Console

from examples.trainer.data.prepare import prepare
from examples.trainer.data.token_files import Dataset
from examples.trainer.models import sharding
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.folder import only_writer
from examples.trainer.runs.launch import check_settings, keep_compiled_programs
from examples.trainer.runs.loop import execute, make_run
from examples.trainer.runs.metrics import Display
from examples.trainer.settings import validation
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import Diverged
from examples.trainer.training.step import Functions, make_functions
from lab.sweeps import command_line, grid, results
from lab.sweeps.command_line import NewSweep
from lab.sweeps.grid import Trial
from lab.sweeps.ledger import Ledger, measured

PAUSE = 5.0  # seconds between checks of what other processes have finished


def sweep(asked: NewSweep, preset: str) -> int:
    if status := finish(asked, preset):
        return status
    print(results.table(results.read(folder_of(asked, preset))))
    return 0


def folder_of(asked: NewSweep, preset: str) -> Path:
    """Where a sweep has its runs and their ledger."""
    return Path(asked.config.runs_dir) / (asked.config.name or f"sweep-{preset}")


def finish(asked: NewSweep, preset: str) -> int:
    """Does the remaining runs of a grid; returns the exit status."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    check_methods(asked)
    keep_compiled_programs()
    dataset, folder = prepare(asked.config.data, console.print), folder_of(asked, preset)
    command_line.keep(folder, asked, preset, dataset)
    ledger = Ledger(folder)
    done, known = so_far(asked.grid, ledger)
    console.print(f"{known} runs, {done} of them done")
    while work := claim(asked.grid, folder, ledger, console.print):
        trial, lock = work
        try:
            stopped_by = run_trial(trial, asked, dataset, folder, ledger, console)
        finally:
            lock.release()  # `claim` has acquired it; `with` would count a second time
        if stopped_by:
            console.print("stopped; the same command continues.")
            return 128 + stopped_by
    return 0


def check_methods(asked: NewSweep) -> None:
    """Refuses what the trainer would refuse of a run."""
    validation.check(asked.grid, "--grid.")
    for method in grid.methods(asked.grid):
        trial = Trial(method, grid.rates(asked.grid, method)[0], 0)
        check_settings(grid.configure(asked.config, trial, asked.config.runs_dir))


def so_far(asked: grid.Grid, ledger: Ledger) -> tuple[int, int]:
    losses = ledger.losses()
    done = sum(trial in losses for trial in grid.wanted(asked, losses))
    return done, grid.count(asked, losses)


def claim(
    asked: grid.Grid, folder: Path, ledger: Ledger, say: Callable[[str], None]
) -> tuple[Trial, FileLock] | None:
    """Locks the next run that no process is doing; returns None when all runs are finished.

    Waits while other processes do the remaining runs.
    """
    (folder / "locks").mkdir(exist_ok=True)
    waiting = False
    while True:
        losses = ledger.losses()
        left = [trial for trial in grid.wanted(asked, losses) if trial not in losses]
        if not left:
            return None
        for trial in left:
            lock = FileLock(folder / "locks" / trial.name)
            with contextlib.suppress(Timeout):
                lock.acquire(blocking=False)
                if trial not in ledger.losses():  # another process may just have finished it
                    return trial, lock
                lock.release()
        if not waiting:
            say("waiting for the runs of other processes ...")
        waiting = True
        time.sleep(PAUSE)


def shared_functions(config: RunConfig, vocab_size: int, mesh: Mesh) -> Functions:
    """The functions of a run, which are those of all runs with other rates, seeds and names."""
    rule = dataclasses.replace(config.optimizer, learning_rate=0.0, adam_learning_rate=0.0)
    kept = RunConfig(
        model=config.model, optimizer=rule, steps=config.steps, accumulate=config.accumulate
    )
    return last_functions(kept, vocab_size, mesh)


last_functions = functools.lru_cache(maxsize=1)(make_functions)
"""A sweep does all runs of one program before those of the next."""


class Steps(Display):
    """Shows the steps of a run, whose result is one line of the sweep."""

    def evaluated(self, step: int, figures: dict[str, Any]) -> None:
        pass


def run_trial(
    trial: Trial, asked: NewSweep, dataset: Dataset, folder: Path, ledger: Ledger, console: Console
) -> int:
    """Does a run or the rest of it and records its result; returns the signal that stopped it."""
    config = grid.configure(asked.config, trial, str(folder / "runs"))
    mesh = sharding.make_mesh(asked.mesh, jax.devices())
    run = make_run(config, dataset, mesh, shared_functions)
    own_folder = Path(config.runs_dir) / trial.name
    if not (own_folder / "config.json").exists():
        shutil.rmtree(own_folder, ignore_errors=True)  # left by a process that was killed
        run_folder.create(config, "", dataset)
    started, diverged_at = time.monotonic(), None
    console.print(f"{trial.name} ...")
    try:
        with only_writer(own_folder):
            display = Steps(console, config.steps)
            _, _, stopped_by = execute(run, own_folder, [display])
        if stopped_by:
            return stopped_by
    except Diverged as error:
        diverged_at = error.step
    result = measured(own_folder, diverged_at, time.monotonic() - started)
    ledger.add(trial, result)
    loss = f"{result.loss:.4f}" if math.isfinite(result.loss) else "diverged"
    done, known = so_far(asked.grid, ledger)
    console.print(f"{trial.name}  {loss}  ({done} of {known})")
    return 0
