"""Checksums of the files of a checkpoint: written with it, and verified before it is read.

Orbax itself does not notice a bit that has changed in an array. Each folder of a checkpoint
(`state`, `about`) gets a file `checksums/rest.json`: the path of a file to its size and its CRC-32.
Checkpoints of earlier versions have more lists in that folder, one of each process. The two folders
are bound: `about` has the SHA-256 of the list of `state`, so that neither can come from another
checkpoint. Names in lists are input: they lead to regular files within the folder, or are refused.
"""

import hashlib
import json
import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from examples.trainer.runs import host_memory

LISTS = "checksums"
REST = "rest.json"  # the list that has all files, or in earlier versions all that no other list has
BOUND = "state.sha256"  # in the lists of `about`: which `state` belongs to it
UNLISTED = "commit_success.txt"  # Orbax writes it last, on disks where it cannot rename a folder
BLOCK = 1 << 20  # bytes that are read at once; they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)

Checksum = tuple[int, str]
"""The size of a file and its CRC-32."""


class Damaged(Exception):
    """A file of a checkpoint does not hold what was written to it; the message names it."""


class CheckedArrays(ocp.StandardCheckpointHandler):
    """Writes arrays as Orbax does, and checksums of their files."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_checksums(Path(directory))


class CheckedJson(ocp.JsonCheckpointHandler):
    """Writes JSON values as Orbax does, and checksums of their files; of a checkpoint's `about`."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        bind(Path(directory))
        write_checksums(Path(directory))
        host_memory.give_back()  # in the thread that saves; `about` is finished last


def write_checksums(folder: Path) -> None:
    rest = folder / LISTS / REST
    paths = [path for path in files(folder) if path != rest]
    with ThreadPoolExecutor(THREADS) as pool:
        found = zip(paths, pool.map(checksum, paths), strict=True)
        sums = {path.relative_to(folder).as_posix(): one for path, one in found}
    rest.parent.mkdir(exist_ok=True)
    rest.write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def bind(about: Path) -> None:
    """Writes into `about` which `state` belongs to it; Orbax has finished that one before."""
    for lists in about.parent.glob(f"state*/{LISTS}"):
        (about / LISTS).mkdir(exist_ok=True)
        (about / LISTS / BOUND).write_text(digest(lists) + "\n")


def digest(lists: Path) -> str:
    """The SHA-256 of all lists of a folder."""
    found = hashlib.sha256()
    for path in sorted(lists.glob("*.json")):
        found.update(path.read_bytes())
    return found.hexdigest()


def check_bound(path: Path) -> None:
    """Raises `Damaged` if the two folders of a checkpoint were not written together.

    Those of earlier versions do not say so.
    """
    bound = path / "about" / LISTS / BOUND
    if bound.exists() and bound.read_text().strip() != digest(path / "state" / LISTS):
        raise Damaged("its state is that of another checkpoint")


def verify(folder: Path, part: int = 0, parts: int = 1) -> bool:
    """Whether a folder of a checkpoint has checksums; raises `Damaged` if a file differs.

    Of several processes each reads the files of its `part` of so many `parts`.
    """
    if not (folder / LISTS).is_dir():
        return False
    lists = {folder / LISTS / REST, *(folder / LISTS).glob("*.json")}
    expected = {name: sums for path in sorted(lists) for name, sums in listed(path).items()}

    present = {path.relative_to(folder).as_posix() for path in files(folder)}
    in_no_list = sorted(
        name for name in present - expected.keys() if Path(name).parts[0] not in (LISTS, UNLISTED)
    )
    if in_no_list:
        raise Damaged(f"{folder / in_no_list[0]} is in no list of checksums")

    def compare(name: str) -> None:
        try:
            check_inside(folder, name)
            seen = checksum(folder / name)
        except OSError as error:
            raise Damaged(f"{folder / name} cannot be read: {error.strerror}") from None
        if list(seen) != expected[name]:
            raise Damaged(f"{folder / name} has another content than was written")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(compare, sorted(expected)[part::parts]))  # raises the first error
    return True


def check_inside(folder: Path, name: str) -> None:
    """Raises `Damaged` unless a name from a list is that of a regular file within the folder."""
    path = Path(name)
    if "\0" in name or path.is_absolute() or ".." in path.parts:
        raise Damaged(f"a list of checksums in {folder} names {name!r}, which is not inside")
    steps = [folder.joinpath(*path.parts[: i + 1]) for i in range(len(path.parts))]
    if any(step.is_symlink() for step in steps) or not stat.S_ISREG((folder / path).stat().st_mode):
        raise Damaged(f"{folder / path} is no regular file")


def checksum(path: Path) -> Checksum:
    """The size and the CRC-32 of a file, of which one block is held at a time."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, f"{crc:08x}"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def listed(path: Path) -> dict[str, list[Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is no list of checksums ({error})") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} is no list of checksums")
    return found
