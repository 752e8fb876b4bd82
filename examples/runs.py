"""The folder of a run: its name, its configuration, its measurements."""

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from examples.config import RunConfig, from_dict
from examples.data import tokenizer
from examples.data.cache import Dataset
from examples.errors import UserError
from examples.files import write_atomically
from examples.processes import is_first

TOKENIZER = "tokenizer.json"
MATRICES = "matrices.jsonl"


def choose_folder(config: RunConfig, preset: str) -> Path:
    """The folder of a new run: the one that was named, or the first unused."""
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


def resume_command(folder: Path) -> str:
    """What to type to continue a run."""
    return f"python -m examples.train --resume {shlex.quote(str(folder))}"


def create(folder: Path, config: RunConfig, dataset: Dataset) -> None:
    """Makes the folder and writes down what the run is about; process 0 does so for all."""
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
        content = json.dumps(about(config, dataset.key), indent=2).encode()
        write_atomically(folder / "config.json", content)
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}.") from None


def about(config: RunConfig, data_key: str) -> dict[str, Any]:
    """The configuration and the name of the data, as JSON values."""
    return {"config": dataclasses.asdict(config), "data": data_key}


def about_step(config: RunConfig, data_key: str, step: int) -> dict[str, Any]:
    """The same, and how far a run is; the loader is at `rows` rows after the first."""
    return {**about(config, data_key), "step": step, "rows": step * config.batch_size}


def reopen(folder: Path) -> tuple[RunConfig, str]:
    """The configuration and the name of the data of an earlier run."""
    path = folder / "config.json"
    try:
        written = json.loads(path.read_text())
        return from_dict(RunConfig, written["config"]), written["data"]
    except FileNotFoundError:
        raise UserError(f"{folder} is no run folder: it has no config.json.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} was not written by this version: {error!r}.") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that a run was trained with."""
    path = folder / TOKENIZER
    if not path.exists():
        raise UserError(f"{folder} has no {TOKENIZER}: put back the one it was trained with.")
    return tokenizer.load(path)


class Metrics:
    """A file of one JSON object per line, with `step` and what was measured at it."""

    def __init__(self, path: Path, step: int):
        """Keeps what an earlier process wrote up to `step`; later records will come again."""
        self.file = None
        if not is_first():  # which has the same numbers, and writes them
            return
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self.file = path.open("a")

    def add(self, step: int, **measured: Any) -> None:
        """Appends a record, at once visible to others."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({"step": step, **measured}) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.file.name}: {error.strerror}. The checkpoints are whole: make "
                "room or mend the disk, and resume."
            ) from None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # of a line that `add` has already complained about
                self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")  # what follows the last line end is not a whole record
    return [json.loads(line) for line in lines[:-1]]
