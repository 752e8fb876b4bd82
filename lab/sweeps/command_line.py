"""The command line of sweeps, and `sweep.json`: the settings that all runs of a sweep share."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from examples.trainer.data.token_files import Dataset
from examples.trainer.settings.command_line import PRESETS, Unprefixed, choose_preset
from examples.trainer.settings.run import RunConfig, check_taken
from examples.trainer.settings.validation import from_dict
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically
from lab.sweeps.grid import VARIED, Grid

PROGRAM = "python -m lab.sweep"
DESCRIPTION = f"""Trains one model with many optimizers, and prints a table.

`{PROGRAM} PRESET --help` lists the flags; those of `--grid` say what is varied. The same command
continues a sweep that was stopped; several processes with the same command share the work."""


@dataclass(frozen=True)
class NewSweep:
    """Runs that differ in their optimizer, rates and seeds."""

    config: Annotated[RunConfig, Unprefixed]
    grid: Grid
    mesh: str = ""
    """How devices are arranged for each run, as data=2,fsdp=4; empty: all of them on fsdp."""


def parse(argv: Sequence[str]) -> tuple[NewSweep, str]:
    """The sweep that the flags ask for, and the name of the preset of its runs."""
    presets = {name: (text, NewSweep(config, Grid())) for name, (text, config) in PRESETS.items()}
    asked, preset = choose_preset(presets, argv, PROGRAM, DESCRIPTION)
    default = presets[preset][1].config
    refuse_what_the_grid_sets(asked, default)
    rule = asked.config.optimizer
    # Folders are named by their factor, and have rules with a factor of their own too.
    before = dataclasses.replace(default.optimizer, shape_scale=rule.shape_scale)
    check_taken(rule, before, asked.grid.optimizers)
    return asked, preset


def refuse_what_the_grid_sets(asked: NewSweep, default: RunConfig) -> None:
    """Refuses flags in whose place every run, or some run, has a value of the grid."""
    for field, flag in VARIED.items():
        if getattr(asked.config.optimizer, field) != getattr(default.optimizer, field):
            raise UserError(
                f"--optimizer.{field.replace('_', '-')} differs from run to run: choose its "
                f"values with --grid.{flag}."
            )
    if asked.config.seed != default.seed:
        raise UserError("--seed differs from run to run: give their number as --grid.seeds.")


def keep(folder: Path, asked: NewSweep, preset: str, dataset: Dataset) -> None:
    """Writes what all runs share; refuses a folder whose runs share something else."""
    base = dataclasses.asdict(shared_config(asked.config))
    plan = {"preset": preset, "data": dataset.key, "base": base}
    path = folder / "sweep.json"
    if path.exists():
        old = read(path)
        if different := [f"{entry.name} ({entry.old!r})" for entry in differences(old, plan)]:
            raise UserError(
                f"{folder} is of another sweep, which has another {', '.join(different)}: choose "
                "another --name, or give the flags it was begun with."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(plan, indent=2).encode())


def read(path: Path) -> dict[str, Any]:
    """What was written; settings that were added to the code since as `from_dict` has it."""
    try:
        old = json.loads(path.read_text())
        return {**old, "base": dataclasses.asdict(from_dict(RunConfig, old["base"]))}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} was not written by this version: {error}. Put it back, or choose another "
            "--name."
        ) from None


MISSING: Final = object()


class Difference(NamedTuple):
    """An entry that is another, with `MISSING` on the side that lacks it."""

    name: str
    """Its keys, joined by dots."""
    old: Any
    new: Any


def differences(old: Any, new: Any, name: str = "") -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            below = f"{name}.{key}" if name else key
            yield from differences(old.get(key, MISSING), new.get(key, MISSING), below)
    elif old != new:
        yield Difference(name, old, new)


def shared_config(config: RunConfig) -> RunConfig:
    """A configuration with defaults in place of the settings that differ from run to run."""
    default = RunConfig()
    rule = {field: getattr(default.optimizer, field) for field in VARIED}
    return dataclasses.replace(
        config,
        name=default.name,
        runs_dir=default.runs_dir,
        seed=default.seed,
        optimizer=dataclasses.replace(config.optimizer, **rule),
    )
