"""The documents that a run reads, and those that are held out for validation.

Plain text is one document, and .jsonl has one per row; <|endoftext|> in a text stands between two.
Without files there is what every machine that runs this has: the source of Python's standard
library, or the prose in it, of which a person can read a sample.
"""

import codecs
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data import topics

from examples.trainer.data.tokenizer import END
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

LINES = (".jsonl", ".ndjson", ".jsonlines")
SUFFIXES = (".txt", ".md", ".py", *LINES)
NAMED = (*LINES, ".json")  # in folders, .json is more often something else than rows
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".npy")
SHORTEST_PIECE = 64  # characters; texts are not cut into shorter pieces
# Tests are missing from slim installations; encodings and topics.py are tables rather than code.
SKIPPED = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "topics.py"}
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"(?:^[ \t]*#[^\n]*\n)+", re.MULTILINE)
SHORTEST_PARAGRAPH = 80  # characters; shorter ones are headings and lists


def read(config: DataConfig, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """The documents, each once, in an order that depends only on their content."""
    if config.source == "documentation" and not config.paths:
        return sorted(paragraphs(standard_library()), key=digest)
    named = named_files(config.paths) if config.paths else standard_library()
    found, room, copies = set[str](), config.max_bytes, 0
    paths = sorted(named, key=lambda path: digest(path.name + str(path.stat().st_size)))
    # Of each file no more is read than there is room for when its turn comes.
    given = (text for path in paths for text in documents(path, room + 1, config.text_field))
    for text in given:
        content = text.encode()
        kept = content[:room].decode(errors="ignore")
        copies += len(kept.encode()) if kept in found else 0
        found.add(kept)
        room -= len(content)
        if room < 0:
            break
    if room < 0:
        size = sum(path.stat().st_size for path in paths)
        say(
            f"read {config.max_bytes:,} bytes of text, from files of {size:,} bytes: "
            "--data.max-bytes says how many."
        )
    if copies > 0.01 * (config.max_bytes - max(room, 0)):
        say(f"{copies:,} bytes are copies of other documents, and are left out.")
    # Documents are cut to at most a quarter of the validation text, so that the split comes out
    # near the wanted share even for a single file.
    longest = max(SHORTEST_PIECE, int(config.val_fraction * sum(map(len, found)) / 4))
    return sorted((piece for text in found for piece in cut(text, longest)), key=digest)


def documents(path: Path, size: int, field: str) -> Iterator[str]:
    """The documents of a file, whose texts may have END between several of them."""
    for text in texts(path, size, field):
        yield from (part for part in text.split(END) if part.strip() or END not in text)


def texts(path: Path, size: int, field: str) -> Iterator[str]:
    """The texts of a file: of rows those in `field`, of plain text only the first `size` bytes."""
    files.check_regular(path)
    if path.suffix.lower() in TABLES:
        raise UserError(
            f"{path} is a table, not text: write its texts to a .jsonl file, a row a line, as "
            '{"text": ...}.'
        )
    with path.open("rb") as file:
        if path.suffix.lower() in NAMED:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield text_of(line, field, f"{path}, line {number}")
            return
        content = file.read(size)
    # An incomplete character is dropped at the limit, but is an error at the end of the file.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        yield decoder.decode(content, final=len(content) < size)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}): convert it or omit it.") from None


def text_of(line: bytes, field: str, where: str) -> str:
    """The text of a row of .jsonl; `where` names the row in errors."""
    try:
        text = json.loads(line)[field]
        text.encode()  # JSON can hold half of a character: "\ud800"
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is no JSON object with a text in {field!r} ({type(error).__name__}: {error}):"
            " name the field that has it with --data.text-field, write one object a line, or omit"
            " the line."
        ) from None
    return text


def split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation documents; the first ones in the order of digests are held out."""
    wanted = val_fraction * sum(map(len, documents))
    held_out = size = 0
    while held_out < len(documents) and size < wanted:
        size += len(documents[held_out])
        held_out += 1
    if held_out == len(documents):
        raise UserError(
            f"too little text: {size} characters cannot be split into training and validation text."
            f" Give more as --data.paths; folders are searched for {', '.join(SUFFIXES)}."
        )
    return documents[held_out:], documents[:held_out]


def split_of(text: str, val_fraction: float) -> str:
    """The split of a document by its hash: copies of a document are in the same one."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    return "val" if number < val_fraction * 2**64 else "train"


def digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


def named_files(paths: Iterable[str]) -> Iterator[Path]:
    """The files given, and those with a known suffix in the folders given, by their names."""
    for given in map(Path, paths):
        if given.is_dir():
            inside = sorted(path for path in given.rglob("*") if path.is_file())
            yield from (path for path in inside if path.suffix.lower() in SUFFIXES)
        else:
            yield given


def standard_library() -> Iterator[Path]:
    """The source of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def cut(text: str, size: int) -> Iterator[str]:
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


def paragraphs(sources: Iterable[Path]) -> list[str]:
    """The prose of `help()`'s topics, of docstrings and of comments: each paragraph once."""
    found = [*topics.topics.values()]
    for path in sources:
        source = path.read_text(encoding="utf-8", errors="ignore")
        found += DOCSTRING.findall(source)
        found += [re.sub(r"(?m)^[ \t]*#+ ?", "", comment) for comment in COMMENT.findall(source)]
    lines = (" ".join(part.split()) for text in found for part in re.split(r"\n\s*\n", text))
    long = [line for line in dict.fromkeys(lines) if len(line) >= SHORTEST_PARAGRAPH]
    return [f"{line}\n\n" for line in long if line[0].isupper() and line[-1] in ".:"]
