"""Size and shape of the library, in figures: `python -m benchmarks.house`.

Counts what somebody who reads the code meets: the lines of each room, and the files and lines that
one update passes. A room is a folder of `optax_muonplus`, a module next to these folders, or a file
of `extras`. `--path` measures another checkout, `--json` keeps the figures, and `--before` prints
kept ones next to the new ones.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from benchmarks.lines import by_function, count
from examples.trainer.system.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "optax_muonplus"

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured, and where the figures go."""

    path: Path = ROOT
    """The checkout that is measured."""
    json: Path | None = None
    """File for the figures."""
    before: Path | None = None
    """File with the figures of another version, which are printed too."""


def main(config: Config) -> None:
    """Measures, prints the tables and writes the figures."""
    root = config.path.resolve()
    if not (root / LIBRARY).is_dir():
        raise SystemExit(f"{root} has no folder {LIBRARY}: give a checkout of it as --path.")
    figures = {"commit": commit(root)} | sizes(root) | run_ways(root)
    show(figures, json.loads(config.before.read_text()) if config.before else {})
    if config.json:
        config.json.write_text(json.dumps(figures, indent=1) + "\n")


def commit(root: Path) -> str:
    """Returns the commit of a checkout, with a plus if files differ; empty if git knows of none."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


# Lines ------------------------------------------------------------------------------------------


def sizes(root: Path) -> Figures:
    """Counts lines and lines of code of each room, and of each folder of the checkout."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    found = {f"folder {folder.name}": count(folder.rglob("*.py")) for folder in folders}
    rooms: dict[str, list[Path]] = {}
    for module, path in modules(root / LIBRARY).items():
        rooms.setdefault(room_of(module), []).append(path)
    counted = {f"room {name}": count(paths) for name, paths in sorted(rooms.items())}
    return {name: size for name, size in (found | counted).items() if size["lines"]}


# Rooms ------------------------------------------------------------------------------------------


def modules(package: Path) -> dict[str, Path]:
    """Maps dotted names within the package to files; a folder stands for its `__init__`."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def room_of(module: str) -> str:
    """Returns the first part of a module's name; each file of `extras` is a room of its own."""
    return module if module.startswith("extras.") else module.partition(".")[0]


# Ways -------------------------------------------------------------------------------------------


def run_ways(root: Path) -> Figures:
    """Measures what runs, in a process that imports the library of the checkout."""
    file = Path(__file__).with_name("ways.py")
    done = subprocess.run(
        [sys.executable, "-P", str(file), str(root)],
        cwd=root,
        env=os.environ
        | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    for figure in figures.values():
        figure |= extent(figure.pop("entered"))
    return figures


def extent(entered: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Counts files, functions and code lines of functions, given by file and first line."""
    lines = {file: by_function(Path(file).read_text()) for file, _ in entered}
    return {
        "files": len(lines),
        "functions": len(entered),
        "code": sum(lines[file].get(first, 0) for file, first in entered),
    }


# Tables -----------------------------------------------------------------------------------------


def show(figures: Figures, before: Figures) -> None:
    """Prints a line for each figure, and what it was before."""
    versions = {"before": before, "now": figures} if before else {"now": figures}
    rows = [
        [name, *(written(version.get(name)) for version in versions.values())]
        for name in dict.fromkeys([*before, *figures])
    ]
    print(markdown(["figure", *versions], rows, left=3, padded=False))


def written(value: Any) -> str:
    """Writes a figure: the numbers of a mapping with their names, the length of a list."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{number:,} {name}" for name, number in value.items())
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(value)}"
    return value if isinstance(value, str) else f"{value:,}"


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.house", description=__doc__))
