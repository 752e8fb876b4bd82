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

from docs.ext.headings import FENCES, LINE, ROOT, outline, placed, section, slug

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


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


def linked(text: str, page: str, source: pathlib.Path) -> tuple[str, set[str]]:
    """A page with the sections in the place of its lines, and the files that they are of."""
    files: set[str] = set()

    def included(match: re.Match[str]) -> str:
        kind, path, title, marks, heading = match.groups()
        files.add(path)
        found, level = section(path, title, kind)
        return placed(_links(found, path, page, pages), level, marks, heading)

    pages = homes(source) if LINE.search(text) else {}
    return LINE.sub(included, text), files


def _expand(app: Sphinx, page: str, content: list[str]) -> None:
    content[0], files = linked(content[0], page, pathlib.Path(app.srcdir))
    for path in files:
        app.env.note_dependency(str(ROOT / path))


def setup(app: Sphinx) -> dict[str, bool]:
    """Expands the lines when a page is read."""
    app.connect("source-read", _expand)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
