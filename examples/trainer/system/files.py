"""Files that are never left half written, .jsonl files, and digests."""

import hashlib
import json
import os
import secrets
import stat
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
        raise UserError(
            f"{path} is no regular file, but a pipe, a device or a folder: put a file in its place."
        )


def sha256(path: Path) -> str:
    """The digest of a file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file, without an end that a kill or a power cut leaves."""
    if not path.exists():
        return []
    check_regular(path)
    *lines, _ = path.read_bytes().split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return [parsed(line, f"{path}, line {number}") for number, line in numbered]


def read_json(path: Path) -> Any:
    """The content of a file of JSON."""
    check_regular(path)
    return parsed(path.read_bytes(), str(path))


def parsed(content: bytes, place: str) -> Any:
    """What JSON stands for; `place` names it in an error."""
    try:
        return json.loads(content)
    except ValueError as error:
        raise UserError(
            f"{place} is cut or damaged ({error}): put back what was written there."
        ) from None


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
