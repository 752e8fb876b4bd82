"""Settings from files: the presets, the paper's recipes, and what `--config` names.

Presets and recipes are the files of examples/recipes. A recipe is a row of the Muon+ paper's tables
of hyperparameters (arXiv 2602.21545) with Muon+; the file of the same name with `-muon` at its end
has what the run of that row with Muon changes.
"""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.system.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"


def read_config_file(path: Path, base: RunConfig) -> RunConfig:
    """`base` with what a file says; of a run's `config.json` all settings but those of its place.

    Raises `UserError` for a setting that there is not, and for a value of another type or range.
    """
    values = content(path)
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

DEFAULT_PRESET = "gpt-tiny"
