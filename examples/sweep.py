"""Many runs of one model that differ in their optimizer: `python -m examples.sweep PRESET`.

Each run is one of the trainer's, in a folder of its own. Finished runs are skipped, a run that was
stopped goes on from its checkpoint, and several processes that are given the same command share the
work. Runs that differ only in rates or seed use one compiled program.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout
from rich.console import Console

from examples import command, grid, runs, sharding
from examples import config as configs
from examples.command import NewSweep
from examples.compilation import keep_compiled_programs
from examples.config import RunConfig
from examples.data.cache import Dataset
from examples.data.prepare import prepare
from examples.errors import Diverged, UserError
from examples.execute import execute
from examples.files import write_atomically
from examples.grid import Cell
from examples.job import assemble
from examples.ledger import Ledger, measured
from examples.report import write_report
from examples.signals import exit_status
from examples.sweep_display import SweepDisplay

PAUSE = 5.0  # seconds between looks at what other processes have finished


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return command.run_command(lambda: sweep(*command.parse_sweep(argv)))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on.")
        return 130


def sweep(asked: NewSweep, preset: str) -> int:
    """Does what is left of a grid, then writes its tables."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    configs.check(asked.config)
    grid.check(asked.grid)
    keep_compiled_programs()
    dataset = prepare(asked.config.data, console.print)
    folder = Path(asked.config.runs_dir) / (asked.config.name or f"sweep-{preset}")
    keep_plan(folder, asked, preset, dataset)
    ledger = Ledger(folder)
    with SweepDisplay(console, asked.grid, ledger) as display:
        while work := claim(asked.grid, folder, ledger, display):
            cell, lock = work
            with lock:
                stopped_by = run_cell(cell, asked, dataset, folder, ledger, display)
            if stopped_by:
                console.print("stopped; the same command goes on.")
                return exit_status(stopped_by)
    console.print(f"tables and figures  {write_report([folder], folder)}")
    return 0


def keep_plan(folder: Path, asked: NewSweep, preset: str, dataset: Dataset) -> None:
    """Writes down what all runs share; refuses a folder whose runs share something else."""
    base = dataclasses.asdict(base_of(asked.config))
    plan = {"preset": preset, "data": dataset.key, "same_rate": asked.grid.same_rate, "base": base}
    path = folder / "sweep.json"
    if path.exists():
        old = json.loads(path.read_text())
        # As it would be written now: what has become a setting since has its default.
        old["base"] = dataclasses.asdict(configs.from_dict(RunConfig, old["base"]))
        if different := list(differences(old, plan)):
            raise UserError(
                f"{folder} is of another sweep, which has another {', '.join(different)}: choose "
                "another --name, or give the flags it was begun with."
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plan, indent=2).encode())
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}.") from None


def base_of(config: RunConfig) -> RunConfig:
    """What is the same in all runs, with the defaults in place of what is not."""
    default = RunConfig()
    rule = {field: getattr(default.optimizer, field) for field in grid.VARIED}
    return dataclasses.replace(
        config,
        name=default.name,
        runs_dir=default.runs_dir,
        seed=default.seed,
        optimizer=dataclasses.replace(config.optimizer, **rule),
    )


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """The names of the entries that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path


def claim(
    asked: grid.Grid, folder: Path, ledger: Ledger, display: SweepDisplay
) -> tuple[Cell, FileLock] | None:
    """The next run that no process works at, locked; waits for others; None when all are done."""
    (folder / "locks").mkdir(exist_ok=True)
    while True:
        losses = ledger.losses()
        left = [cell for cell in grid.wanted(asked, losses) if cell not in losses]
        if not left:
            return None
        for cell in left:
            lock = FileLock(folder / "locks" / cell.name)
            with contextlib.suppress(Timeout):
                lock.acquire(blocking=False)
                if cell not in ledger.losses():  # which another process may just have finished
                    return cell, lock
                lock.release()
        display.wait()
        time.sleep(PAUSE)


def run_cell(
    cell: Cell,
    asked: NewSweep,
    dataset: Dataset,
    folder: Path,
    ledger: Ledger,
    display: SweepDisplay,
) -> int:
    """Does a run, or the rest of it, and notes what came out; the signal that stopped it, or 0."""
    config = grid.configure(asked.config, asked.grid, cell, str(folder / "runs"))
    place = Path(config.runs_dir) / cell.name
    if not (place / "config.json").exists():
        shutil.rmtree(place, ignore_errors=True)  # what a kill left of it before it began
        runs.create(place, config, dataset)
    mesh = sharding.make_mesh(asked.mesh, jax.devices())
    job = assemble(config, dataset, mesh)
    started, diverged_at = time.monotonic(), None
    try:
        outcome = execute(job, place, display.of(cell, config.steps), lambda state, step: None)
        if outcome.stopped_by:
            return outcome.stopped_by
    except Diverged as error:
        diverged_at = error.step
    ledger.add(cell, measured(place, diverged_at, time.monotonic() - started))
    display.finished(cell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
