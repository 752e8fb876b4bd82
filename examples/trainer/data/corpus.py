"""The documents that a run reads, and those that are held out for validation."""

import contextlib
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from examples.trainer.data.documents import PACKED, SUFFIXES, texts
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError

# Tests are missing from slim installations; encodings and topics.py are tables rather than code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
SKIPPED_FILES = {"pydoc_data/topics.py"}
SHORTEST_PIECE = 64  # characters; texts are not cut into shorter pieces


def read(config: DataConfig) -> list[str]:
    """The documents, in an order that depends only on their content.

    Copies of a file count once, so that no copy is in both the training and the validation text.
    """
    files = named_files(config.paths) if config.paths else standard_library()
    found = set()
    room = config.max_bytes
    for path in sorted(files, key=lambda path: digest(path.name + str(path.stat().st_size))):
        # A file of the standard library that is not UTF-8 counts as empty.
        with contextlib.suppress(*([] if config.paths else [UserError])):
            for text in texts(path, room, config.text_field) if room > 0 else ():
                content = text.encode()
                found.add(content[:room].decode(errors="ignore"))
                room -= len(content)
                if room <= 0:
                    break
    if not any(text.strip() for text in found):
        raise UserError(
            f"no text in {', '.join(config.paths)}: give files that are not empty."
            if config.paths
            else "Python's standard library has no source here: give text files as --data.paths."
        )
    # Documents are cut to at most a quarter of the validation text, so that the split comes out
    # near the wanted share even for a single file.
    longest = max(SHORTEST_PIECE, int(config.val_fraction * sum(map(len, found)) / 4))
    return sorted((piece for text in found for piece in cut(text, longest)), key=digest)


def split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation documents; `documents` come in the order of their digests.

    The first documents that make up `val_fraction` of the text are held out. This choice is stable:
    it depends only on content, and an additional document moves only the boundary.
    """
    wanted = val_fraction * sum(map(len, documents))
    held_out = 0
    size = 0
    while held_out < len(documents) and size < wanted:
        size += len(documents[held_out])
        held_out += 1
    if held_out == len(documents):
        raise UserError(
            f"too little text: {size} characters cannot be split into training and validation "
            "text. Give more."
        )
    return documents[held_out:], documents[:held_out]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def standard_library() -> Iterable[Path]:
    """The source of Python's standard library, which every machine that runs this has."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        skipped = relative.as_posix() in SKIPPED_FILES
        if not skipped and not SKIPPED_FOLDERS.intersection(relative.parts):
            yield path


def named_files(paths: Iterable[str]) -> Iterable[Path]:
    """The files given, and those with a known suffix in the folders given."""
    for given in map(Path, paths):
        if given.is_dir():
            inside = [path for path in given.rglob("*") if path.is_file()]
            for path in inside:  # with that suffix a text that was not unpacked
                if path.suffix.lower() in PACKED and Path(path.stem).suffix.lower() in SUFFIXES:
                    raise UserError(f"{path} is packed: unpack it, or move it away.")
            found = [path for path in inside if path.suffix.lower() in SUFFIXES]
            if not found:
                raise UserError(f"{given} holds no {', '.join(SUFFIXES)} file.")
            yield from found
        elif given.is_file():
            yield given
        else:
            raise UserError(f"{given} does not exist: give text files or folders of them.")


def cut(text: str, size: int) -> Iterable[str]:
    """Pieces of at most `size` characters that end a line, or else a word, and join to `text`."""
    start = 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            for mark in ("\n", " "):
                found = text.rfind(mark, start, end)
                if found > start:
                    end = found + 1
                    break
        yield text[start:end]
        start = end
