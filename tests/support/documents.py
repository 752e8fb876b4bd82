"""What README, CONTRIBUTING and the pages of the site say about the repository, parsed."""

import ast
import fnmatch
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# Pages of the site, by their path in docs/.
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
}


class Floor(NamedTuple):
    """A room's floor, the packages that it may import, and the most lines that it may have."""

    number: int
    outside: frozenset[str]
    lines: int


def floors():
    """``{room: Floor}`` from the block of lines ``floor 0: room | package, package | 1,000``."""
    heading = "## How the library is built"
    block = re.search(rf"{heading}\n.*?```text\n(.*?)```", CONTRIBUTING, re.S).group(1)
    found = {}
    for line in block.splitlines():
        form = r"floor (\d+): ([\w.]+) \|(.*)\| ([\d,]+)"
        number, room, outside, lines = re.fullmatch(form, line).groups()
        assert room not in found, f"{room} stands on two floors"
        found[room] = Floor(int(number), _names(outside), int(lines.replace(",", "")))
    return found


def _names(text):
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def file_tree():
    """``{folder: names of its entries}`` as CONTRIBUTING's file tree shows it; "" is the root."""
    block = re.search(r"## What is where\n+```text\n(.*?)```", CONTRIBUTING, re.S).group(1)
    tree, folders = {"": []}, [""]
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folder = folders[depth]
        tree.setdefault(folder, []).append(name)
        folders[depth + 1 :] = [f"{folder}{name}"] if name.endswith("/") else []
    return tree


def entries(folder):
    """Files and folders in a folder, as the tree writes them, less those that explain themselves.

    These are hidden ones, caches, what git ignores, and README.md, ``__init__.py`` and py.typed.
    """
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    ignored += [".*", "__*", "README.md", "py.typed"]
    return [
        path.name + "/" * path.is_dir()
        for path in (ROOT / folder).iterdir()
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    ]


def imported(path):
    """Full names of all that a file imports, with the names after ``from ... import``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:  # only "method" has such imports, because it runs by itself
                assert node.level == 1 and path.parent.name == "method", f"{path}: relative import"
                module = f"optax_muonplus.method.{module}"
            yield from (f"{module}.{alias.name}" for alias in node.names)
