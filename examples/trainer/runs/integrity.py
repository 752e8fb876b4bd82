"""Checksums of the files of a checkpoint: written with it, and verified before it is read.

Each folder of a checkpoint (`state`, `about`) has a folder `checksums`. In it each process lists
the arrays' files that it has written, and process 0 all others, the lists among them. A list is
JSON: the path of a file to its size and its CRC-32. Files are read in blocks and a few at a time,
after they were written and before the checkpoint is complete, by the threads that write it.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

LISTS = "checksums"
REST = "rest.json"  # the list that process 0 writes last: all files that no other list has
BLOCK = 1 << 20  # bytes that are read at once; they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)


class Checksum(NamedTuple):
    """What is known of the content of a file."""

    size: int
    crc32: str


class Damaged(Exception):
    """A file of a checkpoint does not hold what was written to it; the message names it."""


class Checked:
    """Makes a handler of Orbax write checksums of the files that it writes."""

    async def async_save(self, directory: Any, *args: Any, **named: Any) -> Any:
        """Begins to save; the result is there when the files of this process have checksums."""
        futures = await super().async_save(directory, *args, **named)  # ty: ignore[missing-attribute]
        return [Written(futures or [], Path(directory), jax.process_index())]

    def finalize(self, directory: Any) -> None:
        """Completes the folder; only process 0 does so, when all have written their files."""
        super().finalize(directory)  # ty: ignore[missing-attribute]
        folder = Path(directory)
        listed = {name for path in lists(folder) for name in read_list(path)}
        write_list(folder, REST, [f for f in files(folder) if relative(f, folder) not in listed])


class CheckedArrays(Checked, ocp.StandardCheckpointHandler):
    """Orbax's handler of arrays, with checksums."""


class CheckedJson(Checked, ocp.JsonCheckpointHandler):
    """Orbax's handler of JSON values, with checksums."""


class Written:
    """The end of a save in this process: its files are on disk, and have checksums."""

    def __init__(self, futures: Sequence[Any], folder: Path, process: int):
        self.futures, self.folder, self.process = futures, folder, process

    def result(self, timeout: float | None = None) -> None:
        """Waits until the arrays are written, then reads them once."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for future in self.futures:
            future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        own = self.folder / f"ocdbt.process_{self.process}"
        if own.is_dir():
            write_list(self.folder, f"process_{self.process}.json", files(own))

    def cancel(self) -> None:
        """Ends the save as far as Orbax can."""
        for future in self.futures:
            future.cancel()


def verify(folder: Path, part: int = 0, parts: int = 1) -> bool:
    """Whether a folder of a checkpoint has checksums; raises `Damaged` if a file differs.

    Of several processes each reads the files of its `part` of so many `parts`.
    """
    if not (folder / LISTS).is_dir():
        return False
    rest = folder / LISTS / REST
    expected = {name: sums for path in (rest, *lists(folder)) for name, sums in listed(path)}
    mine = sorted(expected)[part::parts]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: checksum_or_error(folder / name), mine)
        for name, seen in zip(mine, found, strict=True):
            if seen != expected[name]:
                raise Damaged(f"{folder / name} {difference(expected[name], seen)}")
    return True


def difference(expected: Checksum, seen: Checksum | OSError) -> str:
    """What is wrong with a file, in words that follow its name."""
    if isinstance(seen, FileNotFoundError):
        return "is missing"
    if isinstance(seen, OSError):
        return f"cannot be read ({seen.strerror})"
    if seen.size != expected.size:
        return f"has {seen.size} bytes in place of {expected.size}"
    return f"has another content than was written (CRC-32 {seen.crc32}, not {expected.crc32})"


def checksum_or_error(path: Path) -> Checksum | OSError:
    """The checksum of a file, or why there is none."""
    try:
        return checksum(path)
    except OSError as error:
        return error


def checksum(path: Path) -> Checksum:
    """The size and the CRC-32 of a file, of which one block is held at a time."""
    block = bytearray(BLOCK)
    view, size, crc = memoryview(block), 0, 0
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            size, crc = size + read, zlib.crc32(view[:read], crc)
    return Checksum(size, f"{crc:08x}")


def files(folder: Path) -> list[Path]:
    """All files in a folder and its folders."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def relative(path: Path, folder: Path) -> str:
    """The name of a file in lists."""
    return path.relative_to(folder).as_posix()


def lists(folder: Path) -> list[Path]:
    """The lists that the processes have written."""
    return sorted((folder / LISTS).glob("process_*.json"))


def write_list(folder: Path, name: str, paths: Iterable[Path]) -> None:
    """Writes the checksums of some files of a folder."""
    paths = list(paths)
    with ThreadPoolExecutor(THREADS) as pool:
        found = zip(paths, pool.map(checksum, paths), strict=True)
        sums = {relative(path, folder): sums for path, sums in found}
    (folder / LISTS).mkdir(exist_ok=True)
    (folder / LISTS / name).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def read_list(path: Path) -> dict[str, Any]:
    """A list; raises `Damaged` if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is no list of checksums ({error})") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} is no list of checksums")
    return found


def listed(path: Path) -> list[tuple[str, Checksum]]:
    """The entries of a list."""
    try:
        return [(name, Checksum(*sums)) for name, sums in read_list(path).items()]
    except TypeError:
        raise Damaged(f"{path} is no list of checksums") from None
