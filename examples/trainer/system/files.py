"""Files that are never left half written, and .jsonl files."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

from examples.trainer.system.errors import UserError


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file in one step: after a power cut too there is the old file or the new one."""
    # A random name, not the process id: processes on other hosts may share the folder and the id.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else the new name may be on the disk before the content
    os.replace(partial, path)


def check_regular(path: Path) -> None:
    """Refuses a pipe or a device, reading which may never end."""
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no regular file: put back the one that the run began with.")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file, none if there is no file.

    Half a line at its end, or zero bytes, as a kill or a power cut leaves them, are left out.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line.strip()]


def parse_json_line(line: bytes, where: str, advice: str) -> Any:
    """The value of a line; `where` names the line in errors."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise UserError(f"{where} is not JSON ({error}). {advice}") from None


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


REMEDIES = {
    errno.ENOSPC: "make room (df and df -i say whether bytes or inodes are used up)",
    errno.EDQUOT: "make room: your quota is used up",
    errno.EROFS: "mount that file system for writing, or copy the folder elsewhere",
    errno.EACCES: "change the permissions, or run as another user",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "move the folder that is in its place away",
    errno.ENOTDIR: "move the file that is in the place of a folder away",
    errno.ENOENT: "put back what was removed or moved",
}


def remedy(error: Exception) -> str:
    return REMEDIES.get(getattr(error, "errno", None) or 0, "make room or repair the disk")


def sentence(error: OSError, path: Path | str, verb: str = "use") -> str:
    """An error of a file in words, without what to do: the file, and what is wrong."""
    name = error.filename if isinstance(error.filename, str) else path
    return f"cannot {verb} {name}: {error.strerror or error}"


def failure(error: OSError, path: Path | str, verb: str, then: str = "") -> UserError:
    """The error to end with: which file, what is wrong, what to do, and `then` on a new line."""
    after = f"\n{then}" if then else ""
    return UserError(f"{sentence(error, path, verb)}. To do: {remedy(error)}.{after}")


@contextlib.contextmanager
def explained(path: Path | str, verb: str = "use", then: str = "") -> Generator[None]:
    """Turns errors of files into sentences: which file, what is wrong, what to do, and `then`.

    `path` is named where the error does not say which file it was.
    """
    try:
        yield
    except (BrokenPipeError, TimeoutError, ConnectionError):  # not of files
        raise
    except OSError as error:
        raise failure(error, path, verb, then) from None


@contextlib.contextmanager
def parsing(path: Path, what: str, advice: str) -> Generator[None]:
    """Turns errors of reading a file and its values into a sentence, with advice."""
    try:
        yield
    except OSError as error:
        raise failure(error, path, "read") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} {what}: {why}. {advice}") from None
