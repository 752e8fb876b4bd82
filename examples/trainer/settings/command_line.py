"""The command line of the trainer: a preset, recipe or file with flags, or a run to continue."""

import dataclasses
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from examples.trainer.settings.run import MachineConfig, Name, RunConfig, check_taken
from examples.trainer.settings.validation import Count, FiniteOrZero, from_dict
from examples.trainer.system.errors import UserError

PROGRAM = "python -m examples.train"
DEFAULT_PRESET = "gpt-tiny"
DESCRIPTION = f"""Pretrains a language model.

`{PROGRAM}` alone runs the preset {DEFAULT_PRESET}; flags without a preset change that one.
`{PROGRAM} PRESET --help` lists all flags. These matter first:

  --data.paths FILE ...           your own text: files or folders
  --optimizer.name NAME           muonplus, muon or adamw
  --optimizer.learning-rate RATE  of the matrices; --optimizer.adam-learning-rate of the rest
  --steps N --batch-size N        how long it trains, on how many rows a step
  --model.d-model N               the width; also --model.n-layer, --model.context
  --mesh data=2,fsdp=4            how devices are arranged
  --name NAME                     the run is kept in runs/NAME

`{PROGRAM} --resume runs/NAME` continues a run that was stopped; only flags about the machine, such
as --mesh, and --steps, which makes it longer, go with it (`{PROGRAM} --resume --help`)."""

RECIPES = Path(__file__).parents[2] / "recipes"
"""Rows of the Muon+ paper's tables of hyperparameters (arXiv 2602.21545), and presets. A file may
have a `base`, whose settings it changes; that of `NAME-muon.toml` is NAME."""


def read_config_file(path: Path, base: RunConfig) -> RunConfig:
    """`base` with what a file gives; of a run's `config.json` all but the settings of its place."""
    values = content(path)
    if "base" in values:
        values = merged(content(path.parent / values.pop("base")), values)
    try:
        if "config" not in values:
            return from_dict(RunConfig, merged(dataclasses.asdict(base), values))
        return dataclasses.replace(
            from_dict(RunConfig, values["config"]), name="", runs_dir=base.runs_dir
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}. Change it there.") from None


def content(path: Path) -> dict[str, Any]:
    read = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        return read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as TOML, or JSON if named so: {error}.") from None


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        found[key] = {**base[key], **value} if both else value
    return found


def read_presets() -> dict[str, tuple[str, RunConfig]]:
    found: dict[str, tuple[str, RunConfig]] = {}
    for path in sorted(RECIPES.glob("*.toml"), key=lambda path: path.stem):
        _, base = found.get(path.stem.removesuffix("-muon"), ("", RunConfig()))
        line, _, _ = path.read_text(encoding="utf-8").partition("\n")
        found[path.stem] = line.removeprefix("# "), read_config_file(path, base)
    return found


PRESETS = read_presets()
"""Name to (one line of help, configuration)."""

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
