"""The command line of the trainer: a preset or recipe with flags, or a run to continue."""

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
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
    """YAML 1.1, but 1e-3 is a number, and a name stands once, as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        once((str(key.value), None) for key, _ in node.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The settings of an object of JSON; raises `ValueError` for a name that it has twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} stands there twice")
        values[name] = value
    return values


READERS = {
    ".yaml": lambda content: yaml.load(content, Loader),
    ".yml": lambda content: yaml.load(content, Loader),
    ".toml": lambda content: tomllib.loads(content.decode()),
    ".json": lambda content: json.loads(content, object_pairs_hook=once),
}


def read_config_file(path: Path, base: RunConfig) -> RunConfig:
    """`base` with what a file says; of a run's `config.json` all settings but those of its place.

    Raises `UserError` for a setting that there is not, naming what is like it, and for a value of
    another type or range.
    """
    values = content(path)
    if is_of_a_run(values):
        values = values["config"]
        check_names(path, values, base)
        # What an older run lacks has the value that it had then, not that of a preset.
        return dataclasses.replace(
            checked_settings(path, values),
            name="",
            runs_dir=base.runs_dir,
        )
    check_names(path, values, base)
    return checked_settings(path, merged(dataclasses.asdict(base), values))


def is_of_a_run(values: dict[str, Any]) -> bool:
    """Whether a file is the `config.json` of a run."""
    return isinstance(values.get("config"), dict)


def content(path: Path) -> dict[str, Any]:
    if path.suffix not in READERS:
        raise UserError(f"--config {path}: give a file that ends in {', '.join(READERS)}.")
    try:
        values = READERS[path.suffix](path.read_bytes())
    except OSError as error:
        raise files.failure(error, path, "read") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}: {reason}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} has no settings: give some, as `steps: 100` in YAML.")
    return values


def checked_settings(path: Path, values: dict[str, Any]) -> RunConfig:
    try:
        return from_dict(RunConfig, values)
    except ValueError as error:
        raise UserError(f"{path}: {error}. Change it there.") from None


def check_names(path: Path, values: dict[str, Any], base: RunConfig) -> None:
    known = list(setting_names(dataclasses.asdict(base)))
    for name in setting_names(values):
        if name in known:
            continue
        last = {each: each.rpartition(".")[2] for each in known}
        near = difflib.get_close_matches(name.rpartition(".")[2], set(last.values()), n=3)
        like = [each for each in known if last[each] in near]
        raise UserError(f"{path}: there is no setting {name}: {meant(like[:3])}")


def meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else "--help lists them."


def setting_names(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """All names in nested settings, each joined by dots to those above it, which come first."""
    for key, value in values.items():
        name = f"{above}{key}"
        yield name
        if isinstance(value, dict):
            yield from setting_names(value, f"{name}.")


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
    """Settings from a .yaml or .toml file, or from the config.json of a run; flags win over it."""
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
    names = (re.sub(r"^(config|machine)\.", "", name) for name in setting_names(settings))
    known = [f"--{name.replace('_', '-')}" for name in names]
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        if near := () if flag in known else difflib.get_close_matches(flag, known, n=3):
            raise UserError(f"there is no flag {flag}: {meant(near)}")


def check_preset(word: str) -> None:
    if not word.startswith("-") and word not in PRESETS:
        near = difflib.get_close_matches(word, PRESETS, n=3)
        raise UserError(f"there is no preset or recipe {word!r}: {meant(near)}")
