"""The command line of the trainer: a preset or recipe with flags, or a run to continue."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from examples.trainer.settings.machines import MachineConfig
from examples.trainer.settings.presets import DEFAULT_PRESET, PRESETS, as_published
from examples.trainer.settings.rules import Name
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import Count, from_dict
from examples.trainer.system import files
from examples.trainer.system.errors import UserError


class Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 is a number, and a name stands once, as in YAML 1.2. JSON is YAML too."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} stands there twice")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_config_file(path: Path, base: RunConfig) -> RunConfig:
    """`base` with what a file says; of a run's `config.json` all settings but those of its place.

    Raises `UserError` for a setting that there is not, and for a value of another type or range.
    """
    values = content(path)
    try:
        if not is_of_a_run(values):
            return from_dict(RunConfig, merged(dataclasses.asdict(base), values))
        return dataclasses.replace(
            from_dict(RunConfig, values["config"]), name="", runs_dir=base.runs_dir
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}. Change it there.") from None


def is_of_a_run(values: dict[str, Any]) -> bool:
    """Whether a file is the `config.json` of a run."""
    return isinstance(values.get("config"), dict)


def content(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_bytes(), Loader)
    except OSError as error:
        raise files.failure(error, path, "read") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as YAML or JSON: {reason}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} has no settings: give some, as `steps: 100` in YAML.")
    return values


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in changes.items():
        below = found.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        found[key] = merged(below, value) if both else value
    return found


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
    as_published: bool = False
    """For a recipe of the paper: sets all in which the paper's code and configurations differ from
    its text, unless those flags are given too (examples/README.md has the list)."""
    file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Settings from a file of YAML or JSON, or from the config.json of a run; flags win over it."""
    compile_for: str = ""
    """Train nothing: compile for h100:N, v5e:4x4, v5p:2x2x1, v6e:2x2 or cpu:N, which need not be
    there, and say whether the run fits, and what a step computes and sends."""


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
        check_resume(argv)
        words = ["--help"] if {"-h", "--help"}.intersection(argv) else argv
        return tyro.cli(Resume, args=words, prog=PROGRAM), ""
    known = {name: (text, NewRun(config)) for name, (text, config) in PRESETS.items()}
    asked, name = choose_preset(known, argv, PROGRAM, DESCRIPTION)
    if not any((asked.as_published, asked.file)):
        return asked, name
    # These change the defaults of other flags, which are then read again.
    text, config = PRESETS[name]
    if asked.file:
        config = read_config_file(asked.file, config)
    if asked.as_published:
        config = as_published(name, config)
    known[name] = text, NewRun(config)
    asked, _ = choose_preset(known, argv, PROGRAM, DESCRIPTION)
    return asked, name


def check_resume(argv: Sequence[str]) -> None:
    refused = [word.split("=")[0] for word in argv if word.startswith("--optimizer.")]
    if refused:
        raise UserError(
            f"--resume goes on with the optimizer that the run began with: {refused[0]} cannot be "
            "given. Start a new run with it, or take the state over in a script of your own."
        )


def choose_preset(
    presets: dict[str, tuple[str, Command]], argv: Sequence[str], program: str, description: str
) -> tuple[Command, str]:
    """A preset changed by the flags, and its name."""
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, DEFAULT_PRESET)
    if words[0] not in (*presets, "-h", "--help"):
        near = difflib.get_close_matches(words[0], presets, n=3) or ["--help"]
        raise UserError(f"there is no preset or recipe {words[0]!r}: try {' or '.join(near)}.")
    command = tyro.extras.overridable_config_cli(
        presets, args=words, prog=program, description=description
    )
    return command, words[0]
