"""The command line: a preset or recipe with flags, or a run to continue."""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from examples import config as configs
from examples.config import MachineConfig, RunConfig
from examples.errors import UserError
from examples.grid import VARIED, Grid, default_grid

PROGRAM = "python -m examples.train"
DESCRIPTION = f"""Pretrains a language model.

`{PROGRAM}` alone runs the preset {configs.DEFAULT_PRESET}; flags without a preset change that one.
`{PROGRAM} PRESET --help` lists the flags.
`{PROGRAM} --resume runs/NAME` continues a run that was stopped; only flags about the machine, such
as --mesh, go with it (`{PROGRAM} --resume --help`)."""

SWEEP = "python -m examples.sweep"
SWEEP_DESCRIPTION = f"""Trains one model with many optimizers, and writes tables and figures.

`{SWEEP} PRESET --help` lists the flags; those of `--grid` say what is varied. The same command goes
on where it was stopped, and given to several processes they share the work."""

HERE = MachineConfig()
Unprefixed = tyro.conf.arg(name="")  # --steps rather than --config.steps


@dataclass(frozen=True)
class NewRun:
    """A run from its start."""

    config: Annotated[RunConfig, Unprefixed]
    machine: Annotated[MachineConfig, Unprefixed] = HERE


@dataclass(frozen=True)
class Resume:
    """Continue a run that was stopped, with the configuration it began with.

    Only where it is computed can be chosen anew: the mesh, and the processes.
    """

    resume: Path
    """Its folder."""
    machine: Annotated[MachineConfig, Unprefixed] = HERE


@dataclass(frozen=True)
class NewSweep:
    """Runs that differ in their optimizer, rates and seeds."""

    config: Annotated[RunConfig, Unprefixed]
    grid: Grid
    mesh: str = ""
    """How devices are arranged for each run, as data=2,fsdp=4; empty: all of them on fsdp."""


Command = TypeVar("Command")


def parse(argv: Sequence[str]) -> tuple[NewRun | Resume, str]:
    """What is asked for, and the name of the preset of a new run."""
    if any(word.split("=")[0] == "--resume" for word in argv):
        words = ["--help"] if {"-h", "--help"}.intersection(argv) else argv
        return tyro.cli(Resume, args=words, prog=PROGRAM), ""
    presets = {name: (text, NewRun(config)) for name, (text, config) in configs.PRESETS.items()}
    return choose(presets, argv, PROGRAM, DESCRIPTION)


def parse_sweep(argv: Sequence[str]) -> tuple[NewSweep, str]:
    """What is to be varied, and the name of the preset that the rest is from."""
    presets = {
        name: (text, NewSweep(config, default_grid(name)))
        for name, (text, config) in configs.PRESETS.items()
    }
    asked, preset = choose(presets, argv, SWEEP, SWEEP_DESCRIPTION)
    before = presets[preset][1].config.optimizer
    for field, flag in VARIED.items():
        if getattr(asked.config.optimizer, field) != getattr(before, field):
            raise UserError(
                f"--optimizer.{field.replace('_', '-')} differs from run to run: choose its "
                f"values with --grid.{flag}."
            )
    return asked, preset


def run_command(work: Callable[[], int | None]) -> int:
    """Does what a command line asks for; the exit status, that of `work` if it has one."""
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def choose(
    presets: dict[str, tuple[str, Command]], argv: Sequence[str], program: str, description: str
) -> tuple[Command, str]:
    """A preset with the flags that change it, and its name."""
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, configs.DEFAULT_PRESET)
    check_preset(words[0])
    command = tyro.extras.overridable_config_cli(
        presets, args=words, prog=program, description=description
    )
    return command, words[0]


def check_preset(word: str) -> None:
    """Refuses a name that is none, with those that are like it."""
    if word.startswith("-") or word in configs.PRESETS:
        return
    near = difflib.get_close_matches(word, configs.PRESETS, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else "--help lists them."
    raise UserError(f"there is no preset or recipe {word!r}: {meant}")
