"""Headings of a document in Markdown, and the text below one of them; needs no Sphinx."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent
LINE = re.compile(r'^%(section|lead) (\S+) "([^"]+)"(?: (#+) "([^"]+)")?$', re.M)
FENCES = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)


def outline(text: str) -> list[tuple[int, int, str]]:
    """``(position, level, title)`` of all headings outside of code."""
    code = [match.span() for match in FENCES.finditer(text)]
    return [
        (match.start(), len(match[1]), match[2])
        for match in re.finditer(r"^(#+) (.+)$", text, re.M)
        if not any(start <= match.start() < end for start, end in code)
    ]


def section(path: str, title: str, kind: str = "section") -> tuple[str, int]:
    """The text below a heading, unless "lead" with the headings under it, and its level.

    Raises:
      LookupError: the file has no such heading.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    headings = outline(text)
    for number, (start, level, found) in enumerate(headings):
        if found == title:
            below = headings[number + 1 :]
            rest = [at for at, other, _ in below if other <= level or kind == "lead"]
            return text[text.index("\n", start) : rest[0] if rest else len(text)].strip(), level
    raise LookupError(f"{path} has no heading {title!r}")


def slug(title: str) -> str:
    """A heading's anchor on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def shifted(text: str, change: int) -> str:
    """The text with all headings some levels lower."""
    for at, level, _ in reversed(outline(text)):
        text = text[:at] + "#" * (level + change) + text[at + level :]
    return text


def placed(text: str, level: int, marks: str | None, heading: str | None) -> str:
    """A section as it stands in a page: under a heading of its own, or as the page's text."""
    if not marks:
        return shifted(text, 1 - level)
    return f"{marks} {heading}\n\n{shifted(text, len(marks) - level)}"


def expanded(page: str) -> str:
    """The text of a page with the sections in the place of its lines."""

    def included(match: re.Match[str]) -> str:
        kind, path, title, marks, heading = match.groups()
        return placed(*section(path, title, kind), marks, heading)

    return LINE.sub(included, page)
