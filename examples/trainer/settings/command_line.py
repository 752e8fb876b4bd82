"""The command line of the trainer: a preset or recipe with flags, or a run to continue."""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from examples.trainer.settings import config_file, init_from, machines, published
from examples.trainer.settings.machine import MachineConfig
from examples.trainer.settings.presets import DEFAULT_PRESET, PRESETS
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import Count
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
as --mesh, and --steps, which extends it, go with it (`{PROGRAM} --resume --help`).
`{PROGRAM} --from-run runs/NAME:STEP --name NEW` goes on from a run's checkpoint in a new run."""

DEFAULT_MACHINE = MachineConfig()
Unprefixed = tyro.conf.arg(name="")  # --steps rather than --config.steps


@dataclass(frozen=True)
class NewRun:
    """A new run."""

    config: Annotated[RunConfig, Unprefixed]
    machine: Annotated[MachineConfig, Unprefixed] = DEFAULT_MACHINE
    known: Annotated[str, tyro.conf.arg(name="machine")] = ""
    """A machine on which a recipe of the paper is known to fit, such as h100-1, h100-8, h100-64,
    v5e-4x4 or v5p-2x2x1: sets --mesh, --accumulate, --model.remat and --model.scan, unless they are
    given too."""
    as_published: bool = False
    """For a recipe of the paper: sets all in which the paper's code and configurations differ from
    its text, unless those flags are given too (examples/README.md has the list)."""
    file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Settings from a .yaml or .toml file, or from the config.json of a run; flags win over it."""
    compile_for: str = ""
    """Train nothing: compile for h100:N, v5e:4x4, v5p:2x2x1, v6e:2x2 or cpu:N, which need not be
    there, and say whether the run fits, how the work is shared, and how long a step may take."""
    json: Path | None = None
    """File for the figures of --compile-for."""


@dataclass(frozen=True)
class Resume:
    """Continue a run that was stopped, with the configuration it began with.

    Only the mesh and the processes can be chosen again, and a larger number of steps.
    """

    resume: Path
    """Folder of the run."""
    steps: Count | None = None
    """Extend the run to this many steps."""
    extend: Literal["stretch", "again"] = "stretch"
    """The learning rates of a run that is extended. stretch: from its last checkpoint on those of a
    run that had the new steps from the start; again: the peak for a share of hold_share of the
    steps that are left, then a linear fall."""
    checkpoint_dir: str = ""
    """The --checkpoint-dir that the run began with, if it had one."""
    machine: Annotated[MachineConfig, Unprefixed] = DEFAULT_MACHINE


Command = TypeVar("Command")


def parse(argv: Sequence[str]) -> tuple[NewRun | Resume, str]:
    """The run that the flags ask for, and the name of its preset if it is a new one."""
    if any(word.split("=")[0] == "--resume" for word in argv):
        check_resume(argv)
        words = ["--help"] if {"-h", "--help"}.intersection(argv) else argv
        return tyro.cli(Resume, args=words, prog=PROGRAM), ""
    presets = {name: (text, NewRun(config)) for name, (text, config) in PRESETS.items()}
    asked, name = choose_preset(presets, argv, PROGRAM, DESCRIPTION)
    given = asked.config
    if not any((asked.as_published, asked.known, asked.file, given.init_from, given.from_run)):
        return asked, name
    # These change the defaults of other flags, which are then read again.
    text, config = PRESETS[name]
    machine = MachineConfig()
    if given.from_run:
        config = config_file.of_branch(given, argv)
    if asked.file:
        config = config_file.read(asked.file, config)
    if asked.as_published:
        config = published.as_published(name, config)
    if asked.known:
        config = machines.on_machine(name, asked.known, config)
        machine = MachineConfig(mesh=machines.mesh(asked.known))
    if weights := given.init_from or config.init_from:
        config = init_from.beginning_with(weights, config)
    presets[name] = text, NewRun(config, machine)
    return choose_preset(presets, argv, PROGRAM, DESCRIPTION)


def check_resume(argv: Sequence[str]) -> None:
    refused = [word.split("=")[0] for word in argv if word.startswith("--optimizer.")]
    if refused:
        raise UserError(
            f"--resume goes on with the optimizer that the run began with: {refused[0]} cannot be "
            "given. Start a new run with it, or take the state over in a script of your own, as "
            "examples/take_over.py does."
        )


def choose_preset(
    presets: dict[str, tuple[str, Command]], argv: Sequence[str], program: str, description: str
) -> tuple[Command, str]:
    """A preset changed by the flags, and its name."""
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, DEFAULT_PRESET)
    check_preset(words[0])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command = tyro.extras.overridable_config_cli(
                presets, args=words, prog=program, description=description
            )
    except SystemExit:
        if "Unrecognized options" in said.getvalue():  # of which tyro lists the help of many
            settings: Any = presets[words[0]][1]
            check_flags(words, dataclasses.asdict(settings))
        sys.stderr.write(said.getvalue())
        raise
    return command, words[0]


def check_flags(words: Sequence[str], settings: dict[str, Any]) -> None:
    """Refuses the first flag that is none, with those that are like it."""
    names = (re.sub(r"^(config|machine)\.", "", name) for name in config_file.names(settings))
    known = [f"--{name.replace('_', '-')}" for name in names]
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        if near := () if flag in known else difflib.get_close_matches(flag, known, n=3):
            raise UserError(f"there is no flag {flag}: did you mean {' or '.join(near)}?")


def check_preset(word: str) -> None:
    if word.startswith("-") or word in PRESETS:
        return
    near = difflib.get_close_matches(word, PRESETS, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else "--help lists them."
    raise UserError(f"there is no preset or recipe {word!r}: {meant}")
