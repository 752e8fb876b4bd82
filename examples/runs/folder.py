"""The folder of a run: its name, its configuration and its tokenizer."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from examples.data import tokenizer
from examples.data.cache import Dataset
from examples.runs.processes import is_first
from examples.settings.run import RunConfig, from_dict
from examples.system.errors import UserError
from examples.system.files import write_atomically

TOKENIZER = "tokenizer.json"


def choose_folder(config: RunConfig, preset: str) -> Path:
    """The folder of a new run: the given name, or the first unused default name."""
    root = Path(config.runs_dir)
    if config.name:
        folder = root / config.name
        if folder.exists():
            raise UserError(
                f"{folder} exists: choose another --name, or continue it with\n"
                f"  {resume_command(folder)}"
            )
        return folder
    base = f"{preset}-{config.optimizer.name}"
    number = 1
    while (folder := root / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return folder


def resume_command(folder: Path, mesh: str = "") -> str:
    """The command that continues a run, on the same mesh."""
    on = f" --mesh {mesh}" if mesh else ""
    return f"python -m examples.train --resume {shlex.quote(str(folder))}{on}"


def create(folder: Path, config: RunConfig, dataset: Dataset) -> None:
    """Makes the folder and writes its configuration and tokenizer; process 0 does so for all."""
    if not is_first():
        if not (folder / "config.json").exists():
            raise UserError(
                f"{folder}, which process 0 has made, is not there: give a --runs-dir on a disk "
                "that all processes share."
            )
        return
    try:
        folder.mkdir(parents=True)
        write_atomically(folder / TOKENIZER, dataset.tokenizer.to_str().encode())
        content = json.dumps(run_metadata(config, dataset.key), indent=2).encode()
        write_atomically(folder / "config.json", content)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}.") from None


def run_metadata(config: RunConfig, data_key: str) -> dict[str, Any]:
    """The configuration and the key of the data, as JSON values."""
    return {"config": dataclasses.asdict(config), "data": data_key}


def step_metadata(config: RunConfig, data_key: str, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint: also its step, and how many rows have been read."""
    return {**run_metadata(config, data_key), "step": step, "rows": step * config.batch_size}


def reopen(folder: Path) -> tuple[RunConfig, str]:
    """The configuration and the data key of an earlier run."""
    path = folder / "config.json"
    try:
        written = json.loads(path.read_text())
        return from_dict(RunConfig, written["config"]), written["data"]
    except FileNotFoundError:
        raise UserError(f"{folder} is no run folder: it has no config.json.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} was not written by this version: {error!r}.") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run."""
    path = folder / TOKENIZER
    if not path.exists():
        raise UserError(f"{folder} has no {TOKENIZER}: put back the one it was trained with.")
    return tokenizer.load(path)
