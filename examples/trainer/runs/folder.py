"""The folder of a run: its name, configuration and tokenizer, and its one writer."""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from examples.trainer.data import tokenizer
from examples.trainer.data.token_files import Dataset
from examples.trainer.runs import processes
from examples.trainer.runs.processes import is_first
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically

VERSION_0_2 = "6aced257"  # its last commit
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


def choose_folder(config: RunConfig, preset: str) -> Path:
    """The folder of a new run: the given name, or the first unused default name."""
    root = Path(config.runs_dir)
    if config.name:
        folder = root / config.name
        with files.explained(folder, "make", "That is --name under --runs-dir."):
            refuse_taken(folder)
        return folder
    base = f"{preset}-{config.optimizer.name}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(root / name for name in names if not (root / name).exists())


def resume_command(folder: Path, mesh: str = "") -> str:
    on = f" --mesh {mesh}" if mesh else ""
    return f"python -m examples.train --resume {shlex.quote(str(folder))}{on}"


def create(folder: Path, config: RunConfig, dataset: Dataset) -> None:
    """Makes the folder and writes its configuration and tokenizer; process 0 does so for all."""
    if not is_first():
        if not (folder / CONFIG).exists():
            raise UserError(
                f"{folder}, which process 0 has made, is not there: give a --runs-dir on a disk "
                "that all processes share."
            )
        return
    # Complete before it gets its name: a folder without config.json could not be resumed, nor
    # made again.
    partial = folder.with_name(f".{secrets.token_hex(8)}.partial")
    with files.explained(folder, "make", "Nothing was left behind."):
        try:
            partial.mkdir(parents=True)
            write_atomically(partial / TOKENIZER, dataset.tokenizer.to_str().encode())
            write_atomically(partial / CONFIG, written(config, dataset.key))
            refuse_taken(folder)  # else an empty folder would be replaced
            partial.rename(folder)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # taken since
                    refuse_taken(folder)
                error.filename = str(folder)
            raise


def refuse_taken(folder: Path) -> None:
    """Raises `UserError` for a name that is taken, and `OSError` for one that cannot be."""
    try:
        folder.lstat()
    except FileNotFoundError:
        return
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder} exists and is no run, as it has no {CONFIG}: choose another --name, or move "
            "it away."
        )
    raise UserError(
        f"{folder} exists: choose another --name, or continue it with\n  {resume_command(folder)}"
    )


def lengthened(folder: Path, config: RunConfig, steps: int | None) -> RunConfig:
    """The settings of a run that is to have so many steps; None: as many as it has."""
    if steps is None:
        return config
    if steps < config.steps:
        raise UserError(
            f"{folder} has {config.steps} steps: give --steps a larger number than that, or leave"
            " it out."
        )
    return dataclasses.replace(config, steps=steps)


def keep_steps(folder: Path, config: RunConfig, data_key: str) -> None:
    """Writes the settings of a run that was made longer; for after its state has been read."""
    if is_first() and read_config(folder)[0] != config:
        write_atomically(folder / CONFIG, written(config, data_key))


def written(config: RunConfig, data_key: str) -> bytes:
    return json.dumps(run_metadata(config, data_key), indent=2).encode()


def run_metadata(config: RunConfig, data_key: str) -> dict[str, Any]:
    return {"config": dataclasses.asdict(config), "data": data_key}


def metadata_of(folder: Path, config: RunConfig, data_key: str) -> Callable[[int], dict[str, Any]]:
    """Step to the metadata of its checkpoint: also how many rows have been read.

    The digest is of the tokenizer in the folder.
    """
    content = (folder / TOKENIZER).read_bytes()
    tokenizer_sha256 = hashlib.sha256(content).hexdigest()
    return lambda step: {
        **run_metadata(config, data_key),
        "step": step,
        "rows": step * config.batch_size,
        "tokenizer_sha256": tokenizer_sha256,
    }


def read_config(folder: Path) -> tuple[RunConfig, str]:
    path = folder / CONFIG
    files.check_regular(path)
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no {CONFIG}.")
    advice = f"A run of version 0.2 goes on with that version: git checkout {VERSION_0_2}."
    with files.parsing(path, "was not written by this version", advice):
        written = json.loads(path.read_text())
        return from_dict(RunConfig, written["config"]), str(written["data"])


def read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.exists():
        raise UserError(f"{folder} has no {TOKENIZER}: put back the one it was trained with.")
    files.check_regular(path)
    return tokenizer.load(path)


LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def only_writer(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Holds the lock of a run folder; raises `UserError`, which names its holder, if it is taken.

    Of several processes that train together process 0 holds it for all. The kernel releases it
    when the process ends, in whatever way; the file stays, and means nothing by itself.
    """
    lock = FileLock(folder / LOCK)
    processes.together(lambda: take_lock(lock, folder, say) if processes.is_first() else None)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def take_lock(lock: FileLock, folder: Path, say: Callable[[str], None]) -> None:
    """Locks without waiting, and writes into the file that this process does."""
    path = folder / LOCK
    files.check_inside(folder)
    holder = path.read_text()[:200].strip() if path.exists() else ""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"{folder} is being written by {holder or 'another process'}, and a run has one "
            "writer: wait until that process ends, or stop it. Its lock ends with it, so that "
            "nothing is to be removed."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(
            f"{folder} is on a file system without locks, so that two processes could write to "
            "it: make sure that no other process does."
        )
    with contextlib.suppress(OSError):  # on a full disk the lock holds, but cannot say whose it is
        path.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n")
