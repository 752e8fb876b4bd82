"""The folder of a run: its name, configuration and tokenizer, and its one writer."""

import contextlib
import dataclasses
import itertools
import json
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from examples.trainer.data.token_files import Dataset
from examples.trainer.runs.processes import is_first
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import read_json, sha256, write_atomically

VERSION_0_2 = "6aced257"  # its last commit
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


def names(config: RunConfig, preset: str) -> Iterator[Path]:
    """The folders that a new run may have: that of its name, or default names without end."""
    root, base = Path(config.runs_dir), f"{preset}-{config.optimizer.name}"
    if not config.name:
        others = (root / f"{base}-{number}" for number in itertools.count(2))
        return itertools.chain([root / base], others)
    if Path(config.name).is_absolute() or ".." in Path(config.name).parts:
        raise UserError(
            f"--name {config.name} is no place in {root}: --runs-dir names another one."
        )
    folder = root / config.name
    if folder.exists():
        raise UserError(
            f"{folder} exists: choose another --name, or continue it with\n"
            f"  {resume_command(folder)}"
        )
    return iter([folder])


def resume_command(folder: Path, mesh: str = "") -> str:
    on = f" --mesh {mesh}" if mesh else ""
    return f"python -m examples.train --resume {shlex.quote(str(folder))}{on}"


def create(config: RunConfig, preset: str, dataset: Dataset) -> Path:
    """Makes the first folder that no other run has made, with its configuration and tokenizer."""
    for folder in names(config, preset):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if config.name or not folder.is_dir():
                raise
            continue
        write_atomically(folder / TOKENIZER, dataset.tokenizer.to_str().encode())
        write_config(folder, config, dataset.key)
        return folder
    raise AssertionError("there are default names without end")


def check_shared(folder: Path) -> None:
    """Refuses a folder of process 0 that this process does not see."""
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder}, which process 0 has made, is not there: give a --runs-dir on a disk that "
            "all processes share."
        )


def lengthened(folder: Path, config: RunConfig, steps: int | None) -> RunConfig:
    """The settings of a run that is to have so many steps; None: as many as it has."""
    if steps is not None and steps < config.steps:
        raise UserError(
            f"{folder} has {config.steps} steps: give --steps a larger number than that, or leave"
            " it out."
        )
    return config if steps is None else dataclasses.replace(config, steps=steps)


def keep_steps(folder: Path, config: RunConfig, data_key: str) -> None:
    """Writes the settings of a run that was made longer; for after its state has been read."""
    if is_first() and read_config(folder)[0] != config:
        write_config(folder, config, data_key)


def write_config(folder: Path, config: RunConfig, data_key: str) -> None:
    values = {"config": dataclasses.asdict(config), "data": data_key}
    write_atomically(folder / CONFIG, json.dumps(values, indent=2).encode())


def read_config(folder: Path) -> tuple[RunConfig, str]:
    """The settings of a run, and the key of its text."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no {CONFIG}.")
    written = read_json(path)
    try:
        return from_dict(RunConfig, written["config"]), str(written["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} was not written by this version: {error}. A run of version 0.2 goes on with "
            f"that version: git checkout {VERSION_0_2}."
        ) from None


def metadata_of(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What a checkpoint holds besides the arrays; the digest is of the tokenizer in the folder."""
    return {"config": dataclasses.asdict(config), "tokenizer_sha256": sha256(folder / TOKENIZER)}


@contextlib.contextmanager
def only_writer(folder: Path) -> Generator[None]:
    """Holds the lock of a run folder, for all that train together; the kernel ends it with them."""
    try:
        with FileLock(folder / "lock", blocking=False) if is_first() else contextlib.nullcontext():
            yield
    except Timeout:
        raise UserError(
            f"{folder} is being written by another process, and a run has one writer: wait until "
            "that process ends, or stop it. Its lock ends with it."
        ) from None
