"""Sections of the repository's READMEs in pages, so that a fact is written in one place.

A line ``%section README.md "On a mesh"`` in a page stands for the text below that heading, with the
sections under it. ``%section README.md "On a mesh" ## "A title"`` gives it a heading of this level;
headings under it follow. ``%lead`` in place of ``%section`` stands for the text up to the next
heading only. Links to sections that a page has lead there; links to other files of the repository
become the file's name, and pictures are taken from where they lie.
"""

import os
import pathlib
import re

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = pathlib.Path(__file__).parent.parent.parent
LINE = re.compile(r'^%(section|lead) (\S+) "([^"]+)"(?: (#+) "([^"]+)")?$', re.M)
FENCES = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def outline(text: str) -> list[tuple[int, int, str]]:
    """``(position, level, title)`` of all headings outside of code."""
    code = [match.span() for match in FENCES.finditer(text)]
    return [
        (match.start(), len(match[1]), match[2])
        for match in re.finditer(r"^(#+) (.+)$", text, re.M)
        if not any(start <= match.start() < end for start, end in code)
    ]


def section(path: str, title: str, kind: str = "section") -> tuple[str, int]:
    """The text below a heading, unless "lead" with the headings under it, and its level."""
    text = (ROOT / path).read_text(encoding="utf-8")
    headings = outline(text)
    for number, (start, level, found) in enumerate(headings):
        if found == title:
            below = headings[number + 1 :]
            rest = [at for at, other, _ in below if other <= level or kind == "lead"]
            return text[text.index("\n", start) : rest[0] if rest else len(text)].strip(), level
    raise ExtensionError(f"{path} has no heading {title!r}")


def slug(title: str) -> str:
    """A heading's anchor on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def homes(source: pathlib.Path) -> dict[str, str]:
    """``{file#anchor: page#anchor}`` for sections that pages include, with those under them."""
    found: dict[str, str] = {}
    for page in sorted(source.rglob("*.md")):
        if "_build" in page.parts:
            continue
        name = page.relative_to(source).as_posix()
        for kind, path, title, _, heading in LINE.findall(page.read_text(encoding="utf-8")):
            text, _ = section(path, title, kind)
            home = f"{name}#{slug(heading)}" if heading else name
            found.setdefault(f"{path}#{slug(title)}", home)
            for _, _, below in outline(text):
                found.setdefault(f"{path}#{slug(below)}", f"{name}#{slug(below)}")
    return found


def _links(text: str, path: str, page: str, pages: dict[str, str]) -> str:
    def moved(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        file, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
        here = os.path.dirname(os.path.join("docs", page))
        if picture:
            return f"![{words}]({os.path.relpath(file, here)})"
        home = pages.get(f"{file}#{anchor}")
        if file.startswith("docs/") and file.endswith(".md"):
            home = target[target.index("docs/") + 5 :]
        if home:  # without words Sphinx writes the page's title, where they name the file
            return f"[{'' if words.strip('`').endswith('.md') else words}](/{home})"
        if not (ROOT / file).exists():
            raise ExtensionError(f"{path} links to {target}, which does not exist")
        name = words.strip("`")
        return f"`{file}`" if name in (file, target) else f"{words} (`{file}`)"

    parts, last = [], 0
    for code in FENCES.finditer(text):
        parts += [LINK.sub(moved, text[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, LINK.sub(moved, text[last:])])


def _headings(text: str, change: int) -> str:
    shifted = text
    for at, level, _ in reversed(outline(text)):
        shifted = shifted[:at] + "#" * (level + change) + shifted[at + level :]
    return shifted


def _expand(app: Sphinx, page: str, content: list[str]) -> None:
    def included(match: re.Match[str]) -> str:
        kind, path, title, marks, heading = match.groups()
        app.env.note_dependency(str(ROOT / path))
        text, level = section(path, title, kind)
        text = _links(text, path, page, pages)
        if not marks:
            return _headings(text, 1 - level)
        return f"{marks} {heading}\n\n{_headings(text, len(marks) - level)}"

    pages = homes(pathlib.Path(app.srcdir)) if LINE.search(content[0]) else {}
    content[0] = LINE.sub(included, content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Expands the lines when a page is read."""
    app.connect("source-read", _expand)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
