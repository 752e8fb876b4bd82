"""The text of the default run: what Python's own documentation says, and its standard library.

The prose of `help()`'s topics, of docstrings and of comments is on every machine that runs this. A
person can read it, and so a sample of a model that was trained on it.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics

DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"(?:^[ \t]*#[^\n]*\n)+", re.MULTILINE)
SHORTEST = 80  # characters; shorter paragraphs are headings and lists


def paragraphs(sources: Iterable[Path]) -> list[str]:
    """The paragraphs of the topics and of some source files, each once, with one line each."""
    texts = [*topics.topics.values(), *words_of(sources)]
    found = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return [f"{x}\n\n" for x in dict.fromkeys(found) if is_prose(x)]


def words_of(sources: Iterable[Path]) -> Iterator[str]:
    """The docstrings and comments of source files."""
    for path in sources:
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield from DOCSTRING.findall(source)
        for comment in COMMENT.findall(source):
            yield re.sub(r"(?m)^[ \t]*#+ ?", "", comment)


def is_prose(paragraph: str) -> bool:
    return len(paragraph) >= SHORTEST and paragraph[0].isupper() and paragraph[-1] in ".:"
