"""The command line of the trainer: a preset or recipe with flags, or a run to continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from examples.trainer.settings.presets import DEFAULT_PRESET, PRESETS, read_config_file
from examples.trainer.settings.run import MachineConfig, Name, RunConfig, check_taken
from examples.trainer.settings.validation import Count, FiniteOrZero
from examples.trainer.system.errors import UserError

PROGRAM = "python -m examples.train"
DESCRIPTION = f"""Pretrains a language model.

`{PROGRAM}` alone runs the preset {DEFAULT_PRESET}; flags without a preset change that one.
`{PROGRAM} PRESET --help` lists all flags. These matter first:

  --data.paths FILE ...           your own text: files or folders
  --optimizer.name NAME           muonplus, muon, adamw or another rule
  --optimizer.learning-rate RATE  of the matrices; --optimizer.adam-learning-rate of the rest
  --steps N --batch-size N        how long it trains, on how many rows a step
  --model.d-model N               the width; also --model.n-layer, --model.context
  --mesh data=2,fsdp=4            how devices are arranged
  --name NAME                     the run is kept in runs/NAME

`{PROGRAM} --resume runs/NAME` continues a run that was stopped; only flags about the machine, such
as --mesh, and --steps, which makes it longer, go with it (`{PROGRAM} --resume --help`)."""

DEFAULT_MACHINE = MachineConfig()
Unprefixed = tyro.conf.arg(name="")  # --steps rather than --config.steps


@dataclass(frozen=True)
class NewRun:
    """A new run."""

    config: Annotated[RunConfig, Unprefixed]
    machine: Annotated[MachineConfig, Unprefixed] = DEFAULT_MACHINE
    against: Name | None = None
    """Do the same run with this update rule too, and draw the losses of both and their
    difference."""
    against_rate: FiniteOrZero | None = None
    """Its peak rate of the matrices; None: that of the run if updates of both rules have one size,
    otherwise the rule's default."""
    file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Settings from a file of TOML, or from the config.json of a run; flags win over it."""


@dataclass(frozen=True)
class Resume:
    """Continue a run that was stopped, with the configuration it began with.

    Only the mesh and the processes can be chosen again, and a larger number of steps.
    """

    resume: Path
    """Folder of the run."""
    steps: Count | None = None
    """Make the run longer: this many steps in all, with the learning rates of a run that had them
    from its start."""
    machine: Annotated[MachineConfig, Unprefixed] = DEFAULT_MACHINE


Command = TypeVar("Command")


def parse(argv: Sequence[str]) -> tuple[NewRun | Resume, str]:
    """The run that the flags ask for, and the name of its preset if it is a new one."""
    if any(word.split("=")[0] == "--resume" for word in argv):
        words = ["--help"] if {"-h", "--help"}.intersection(argv) else argv
        asked, others = tyro.cli(Resume, args=words, prog=PROGRAM, return_unknown_args=True)
        if others:
            raise UserError(
                f"{others[0]} does not go with --resume, as a run keeps its settings: leave it out,"
                f" or start a new run with --config {asked.resume / 'config.json'}."
            )
        return asked, ""
    known = {name: (text, NewRun(config)) for name, (text, config) in PRESETS.items()}
    asked, name = choose_preset(known, argv, PROGRAM, DESCRIPTION)
    if asked.file:  # it changes the defaults of other flags, which are then read again
        text, config = PRESETS[name]
        known[name] = text, NewRun(read_config_file(asked.file, config))
        asked, _ = choose_preset(known, argv, PROGRAM, DESCRIPTION)
    rule, before = asked.config.optimizer, known[name][1].config.optimizer
    check_taken(rule, before, [rule.name])
    return asked, name


def choose_preset(
    presets: dict[str, tuple[str, Command]], argv: Sequence[str], program: str, description: str
) -> tuple[Command, str]:
    """A preset changed by the flags, and its name."""
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, DEFAULT_PRESET)
    words[0] = words[0].replace("_", "-")  # as tyro reads it
    command = tyro.extras.overridable_config_cli(
        presets, args=words, prog=program, description=description
    )
    return command, words[0]
