"""The command line: a preset or recipe with flags, or a run to continue."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from examples import config as configs
from examples.config import MachineConfig, RunConfig
from examples.errors import UserError

PROGRAM = "python -m examples.train"
DESCRIPTION = f"""Pretrains a language model.

`{PROGRAM}` alone runs the preset {configs.DEFAULT_PRESET}; flags without a preset change that one.
`{PROGRAM} PRESET --help` lists the flags.
`{PROGRAM} --resume runs/NAME` continues a run that was stopped; only flags about the machine, such
as --mesh, go with it (`{PROGRAM} --resume --help`)."""

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


def parse(argv: Sequence[str]) -> tuple[NewRun | Resume, str]:
    """What is asked for, and the name of the preset of a new run."""
    if any(word.split("=")[0] == "--resume" for word in argv):
        words = ["--help"] if {"-h", "--help"}.intersection(argv) else argv
        return tyro.cli(Resume, args=words, prog=PROGRAM), ""
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, configs.DEFAULT_PRESET)
    check_preset(words[0])
    presets = {name: (text, NewRun(config)) for name, (text, config) in configs.PRESETS.items()}
    command = tyro.extras.overridable_config_cli(
        presets, args=words, prog=PROGRAM, description=DESCRIPTION
    )
    return command, words[0]


def check_preset(word: str) -> None:
    """Refuses a name that is none, with those that are like it."""
    if word.startswith("-") or word in configs.PRESETS:
        return
    near = difflib.get_close_matches(word, configs.PRESETS, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else "--help lists them."
    raise UserError(f"there is no preset or recipe {word!r}: {meant}")
