"""Settings from a file: YAML, TOML, or the `config.json` of a run."""

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
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


def read(path: Path, base: RunConfig) -> RunConfig:
    """`base` with what a file says; of a run's `config.json` all settings but those of its place.

    Raises `UserError` for a setting that there is not, naming what is like it, and for a value of
    another type or range.
    """
    values = content(path)
    if isinstance(values.get("config"), dict):
        values = values["config"]
        check_names(path, values, base)
        # What an older run lacks has the value that it had then, not that of a preset.
        return dataclasses.replace(
            settings(path, values),
            name="",
            from_run="",
            runs_dir=base.runs_dir,
            checkpoint_dir=base.checkpoint_dir,
            earlier_steps=(),
        )
    check_names(path, values, base)
    return settings(path, merged(dataclasses.asdict(base), values))


def of_branch(config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """The settings of the run that `--from-run` names, of which flags may change any."""
    if not argv[0].startswith("-"):
        raise UserError(f"--from-run takes the settings of that run: leave out {argv[0]}.")
    if config.init_from:
        raise UserError("--from-run and --init-from both give weights: leave one of them out.")
    run, _ = origin(config.from_run)
    return dataclasses.replace(read(run / "config.json", config), init_from="")


def origin(ref: str) -> tuple[Path, int | None]:
    """The folder and the step of RUN or RUN:STEP."""
    run, _, step = ref.rpartition(":")
    if Path(ref).is_dir() or not step.isdecimal():
        return Path(ref), None
    return Path(run), int(step)


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


def settings(path: Path, values: dict[str, Any]) -> RunConfig:
    try:
        return from_dict(RunConfig, values)
    except ValueError as error:
        raise UserError(f"{path}: {error}. Change it there.") from None


def check_names(path: Path, values: dict[str, Any], base: RunConfig) -> None:
    known = list(names(dataclasses.asdict(base)))
    for name in names(values):
        if name in known:
            continue
        last = {each: each.rpartition(".")[2] for each in known}
        near = difflib.get_close_matches(name.rpartition(".")[2], set(last.values()), n=3)
        like = [each for each in known if last[each] in near]
        meant = f"did you mean {' or '.join(like[:3])}?" if like else "--help lists what there is."
        raise UserError(f"{path}: there is no setting {name}: {meant}")


def names(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """All names in nested settings, each joined by dots to those above it, which come first."""
    for key, value in values.items():
        name = f"{above}{key}"
        yield name
        if isinstance(value, dict):
            yield from names(value, f"{name}.")


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in changes.items():
        below = found.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        found[key] = merged(below, value) if both else value
    return found
