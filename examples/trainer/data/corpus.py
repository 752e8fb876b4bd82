"""The documents that a run reads, and those that are held out for validation.

Plain text is one document; .jsonl and .parquet have one per row. What a file is says its suffix in
any case, and its content, so that no table is read as a text.
"""

import codecs
import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files, optional_packages
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import parse_json_line

LINES = (".jsonl", ".ndjson")
CODE = (".md", ".py")  # may begin as JSON does
SUFFIXES = (".txt", *CODE, *LINES, ".parquet")
TABLES = (".csv", ".tsv", ".json")  # whose marks are no text
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
PARQUET = b"PAR1"
BEGINNINGS = {
    b"\x1f\x8b": "packed by gzip: unpack it (gunzip)",
    b"BZh": "packed by bzip2: unpack it (bunzip2)",
    b"\xfd7zXZ": "packed by xz: unpack it (unxz)",
    b"(\xb5/\xfd": "packed by Zstandard: unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive: unpack it (unzip)",
    b"\x93NUMPY": "an array of NumPy: write its content alone (np.load(...).tofile)",
    b"optax_muonplus tokens": "a shard of version 0.2.0, which still reads it: prepare it again",
    b"\x01\x34\xd8\x88": "of big-endian numbers: write them little-endian",
    b"\x01\x34\xd9\xa1": "of big-endian numbers: write them little-endian",
}
ROWS_AT_ONCE = 1024  # of a .parquet file in memory


def texts(path: Path, size: int, field: str) -> Iterator[str]:
    """The documents of a file that the user named; of plain text only the first `size` bytes.

    `field` is the field of .jsonl and .parquet rows that holds the text.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet" or check_known(path) == PARQUET:
            yield from parquet_rows(path, field)
        elif suffix in LINES:
            yield from json_lines(path, field)
        else:
            text = decode(path, size)
            if suffix in TABLES or (suffix not in CODE and is_json(text)):
                raise UserError(
                    f"{path} is no plain text, but JSON or a table: write it as {LINES[0]}, with a"
                    " JSON object in each line and the text in a field (--text-field). If that is"
                    f" what it has, the name has to end in {LINES[0]}."
                )
            yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): convert it or omit it.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    except MemoryError:
        raise UserError(
            f"{path} does not fit into memory: give a smaller --data.max-bytes, or text files of "
            "parts of it."
        ) from None


def check_known(path: Path) -> bytes:
    """The first bytes of a file; refuses one whose first bytes say that it is something else."""
    with files.explained(path, "read"), path.open("rb") as file:
        start = file.read(32)
    for beginning, what in BEGINNINGS.items():
        if start.startswith(beginning):
            raise UserError(f"{path} is {what}.")
    return start[: len(PARQUET)]


def is_json(text: str) -> bool:
    """Whether a text is JSON, or its first line is."""
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
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = parse_json_line(line, where, "A .jsonl file has one object in each line.")
            yield text_of(row, field, where)


def text_of(row: object, field: str, where: str) -> str:
    """The text of a row; `where` names the row in errors."""
    if not isinstance(row, dict) or field not in row:
        has = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise UserError(
            f"{where} has no field {field!r}, but {has or 'nothing'}: name the one that holds the "
            "text with --data.text-field."
        )
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where} has no text in {field!r}, but {str(text)[:40]!r}: omit it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a character: "\ud800"
        raise UserError(f"{where} is not text that UTF-8 can write ({error}): omit it.") from None
    return text


def parquet_rows(path: Path, field: str) -> Iterator[str]:
    """The text in each row of a table; nulls count as empty."""
    parquet = optional_packages.load("pyarrow.parquet", f"{path}, a .parquet file,", "fineweb")
    arrow = optional_packages.load("pyarrow", "a .parquet file", "fineweb")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                text_of(dict.fromkeys(names), field, str(path))
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield text_of({field: text}, field, str(path))
    except arrow.ArrowException as error:
        raise UserError(f"{path} cannot be read as a .parquet file: {error}") from None


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
