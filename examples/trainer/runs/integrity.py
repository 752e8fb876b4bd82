"""The checksums of a checkpoint: written with it, and compared before it is read.

Orbax does not notice a bit that has changed in an array. `about/checksums.json` has the size and
the CRC-32 of every file of `state` and of `about`, so that neither can come from another
checkpoint. Only files that are there are opened: a list from elsewhere leads nowhere.
"""

import json
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

LIST = "checksums.json"
UNLISTED = (LIST, "commit_success.txt")  # Orbax writes the second where no folder can be renamed
BLOCK = 1 << 20  # bytes that are read at once; they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)


class Damaged(Exception):
    """A file of a checkpoint does not hold what was written to it; the message names it."""


class CheckedJson(ocp.JsonCheckpointHandler):
    """Writes `about` as Orbax does, and then the checksums of all files; `state` is complete."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        about = Path(directory)  # it gets its name afterwards
        found = {**files(about.parent / "state", "state"), **files(about, "about")}
        sums = checksums(list(found.values()))
        (about / LIST).write_text(json.dumps(dict(zip(found, sums, strict=True)), indent=1) + "\n")


def files(folder: Path, name: str) -> dict[str, Path]:
    """The regular files of a part of a checkpoint by their names, without those behind links."""
    paths = (x for x in sorted(folder.rglob("*")) if x.is_file() and not x.is_symlink())
    return {
        f"{name}/{x.relative_to(folder).as_posix()}": x for x in paths if x.name not in UNLISTED
    }


def checksums(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(checksum, paths))


def checksum(path: Path) -> str:
    """The size of a file and its CRC-32; one block of it is held at a time."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return f"{size} {crc:08x}"


def verify(step: Path, part: int = 0, parts: int = 1) -> None:
    """Raises `Damaged` if a file of a checkpoint is missing, new, or differs from its checksum.

    Of several processes each reads the files of its `part` of so many `parts`.
    """
    path = step / "about" / LIST
    found = {**files(step / "state", "state"), **files(step / "about", "about")}
    try:
        expected = dict(json.loads(path.read_text(encoding="utf-8")))
        own = sorted(found.keys() & expected.keys())[part::parts]
        seen = checksums([found[name] for name in own])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is no list of checksums ({error})") from None
    for name in sorted(found.keys() ^ expected.keys()):
        what = "is in no list of checksums" if name in found else "is missing, or no regular file"
        raise Damaged(f"{step / name} {what}")
    for name, one in zip(own, seen, strict=True):
        if one != expected[name]:
            raise Damaged(f"{found[name]} has another content than was written")
