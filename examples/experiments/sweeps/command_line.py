"""The command line of sweeps: a preset or recipe, and what is varied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from examples.experiments.sweeps.grid import VARIED, Grid, default_grid
from examples.trainer.settings.command_line import Unprefixed, choose_preset
from examples.trainer.settings.presets import COMPARED
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError

PROGRAM = "python -m examples.sweep"
DESCRIPTION = f"""Trains one model with many optimizers, and writes tables and figures.

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
    presets = {
        name: (text, NewSweep(config, default_grid(name)))
        for name, (text, config) in COMPARED.items()
    }
    asked, preset = choose_preset(presets, argv, PROGRAM, DESCRIPTION)
    if asked.config.from_run:
        raise UserError("--from-run goes on with one run: leave it out of a sweep.")
    default = presets[preset][1].config.optimizer
    for field, flag in VARIED.items():
        if getattr(asked.config.optimizer, field) != getattr(default, field):
            raise UserError(
                f"--optimizer.{field.replace('_', '-')} differs from run to run: choose its "
                f"values with --grid.{flag}."
            )
    return asked, preset
