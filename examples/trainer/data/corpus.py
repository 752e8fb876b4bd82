"""The documents that a run reads, and those that are held out for validation.

Plain text is one document, and .jsonl has one per row.
"""

import codecs
import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from examples.trainer.data import documentation
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

LINES = (".jsonl", ".ndjson")
CODE = (".md", ".py")  # may begin as JSON does
SUFFIXES = (".txt", *CODE, *LINES)
TABLES = (".csv", ".tsv", ".json")  # whose marks are no text


def texts(path: Path, size: int, field: str) -> Iterator[str]:
    """The documents of a file that the user named; of plain text only the first `size` bytes.

    `field` is the field of .jsonl rows that holds the text.
    """
    files.check_regular(path)
    with files.explained(path, "read"):
        if path.suffix.lower() in LINES:
            yield from json_lines(path, field)
        else:
            yield plain_text(path, size)


def plain_text(path: Path, size: int) -> str:
    """The text of a file; refuses one that is something else."""
    try:
        text = decode(path, size)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): convert it or omit it.") from None
    suffix = path.suffix.lower()
    if suffix in TABLES or (suffix not in CODE and is_json(text)):
        raise UserError(
            f"{path} is no plain text, but JSON or a table: write it as {LINES[0]}, with a JSON"
            " object in each line and the text in a field (--data.text-field). If that is what it"
            f" has, the name has to end in {LINES[0]}."
        )
    if "\0" in text:
        raise UserError(f"{path} holds zero bytes, as UTF-16 and binary files do: convert it.")
    return text


def is_json(text: str) -> bool:
    """Whether the first line of a text, or all of it, is JSON."""
    text = text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").lstrip()
    return text.startswith(("{", "[")) and (parses(text.split("\n", 1)[0]) or parses(text))


def parses(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def decode(path: Path, size: int) -> str:
    """The first `size` bytes of a text file, exactly; raises `UnicodeDecodeError`, `OSError`."""
    with path.open("rb") as file:
        content = file.read(min(size, os.fstat(file.fileno()).st_size + 1))
    # An incomplete character is dropped at the limit, but is an error at the end of the file.
    decoder = codecs.getincrementaldecoder("utf-8")()
    return decoder.decode(content, final=len(content) < size)


def json_lines(path: Path, field: str) -> Iterator[str]:
    """The text in each line's object; empty lines are skipped and nulls count as empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                advice = "A .jsonl file has one object in each line."
                yield text_of(files.parse_json_line(line, where, advice), field, where)


def text_of(row: object, field: str, where: str) -> str:
    """The text of a row; `where` names the row in errors."""
    if not isinstance(row, dict) or field not in row:
        has = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(
            f"{where} has no field {field!r}, but {has or 'nothing'}: name the one that holds the "
            "text with --data.text-field."
        )
    text = "" if row[field] is None else row[field]
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):  # JSON can hold half of a character: "\ud800"
        raise UserError(
            f"{where} has no text in {field!r}, but {files.shown(text)}: omit the line."
        ) from None
    return text


# Tests are missing from slim installations; encodings and topics.py are tables rather than code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages"}
SKIPPED_FILES = {"pydoc_data/topics.py"}
SHORTEST_PIECE = 64  # characters; texts are not cut into shorter pieces


def read(config: DataConfig, say: Callable[[str], None]) -> list[str]:
    """The documents, in an order that depends only on their content.

    Copies of a text count once, so that no copy is in both the training and the validation text.
    """
    if config.source == "documentation" and not config.paths:
        return sorted(documentation.paragraphs(standard_library()), key=digest)
    named = named_files(config.paths) if config.paths else standard_library()
    found, room, copies = set[str](), config.max_bytes, 0
    for path in sorted(named, key=lambda path: digest(path.name + str(path.stat().st_size))):
        # A file of the standard library that is not UTF-8 counts as empty.
        with contextlib.suppress(*([] if config.paths else [UserError])):
            for text in texts(path, room, config.text_field) if room > 0 else ():
                content = text.encode()
                kept = content[:room].decode(errors="ignore")
                copies += len(kept.encode()) if kept in found else 0
                found.add(kept)
                room -= len(content)
                if room <= 0:
                    break
    if copies > 0.01 * config.max_bytes - 0.01 * room:
        say(f"{copies:,} bytes are copies of other documents, and are left out.")
    if not any(text.strip() for text in found):
        where = ", ".join(config.paths) or "Python's standard library"
        raise UserError(f"no text in {where}: give files that are not empty as --data.paths.")
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
    held_out = size = 0
    while held_out < len(documents) and size < wanted:
        size += len(documents[held_out])
        held_out += 1
    if held_out == len(documents):
        raise UserError(
            f"too little text: {size} characters cannot be split into training and validation "
            "text. Give more."
        )
    return documents[held_out:], documents[:held_out]


def split_by(val_fraction: float) -> Callable[[str], str]:
    """The split of a document by its hash: copies of a document are in the same one."""

    def split_of(text: str) -> str:
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        return "val" if number < val_fraction * 2**64 else "train"

    return split_of


def digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def standard_library() -> Iterable[Path]:
    """The source of Python's standard library, which every machine that runs this has."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = relative.as_posix() in SKIPPED_FILES
        if not skipped and not SKIPPED_FOLDERS.intersection(relative.parts):
            yield path


def named_files(paths: Iterable[str]) -> Iterable[Path]:
    """The files given, and those with a known suffix in the folders given, by their names."""
    for given in map(Path, paths):
        if given.is_dir():
            inside = sorted(path for path in given.rglob("*") if path.is_file())
            found = [path for path in inside if path.suffix.lower() in SUFFIXES]
            if not found:
                raise UserError(f"{given} holds no {', '.join(SUFFIXES)} file.")
            yield from found
        elif given.exists():
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
