"""Size and shape of the library, in figures: `python -m benchmarks.house`.

Counts what somebody who reads the code meets: lines, rooms, imports between rooms, repeated
arguments, and the files and lines that one update passes. A room is a folder of `optax_muonplus`,
a module next to these folders, or a file of `extras`. `--path` measures another checkout, `--json`
keeps the figures, and `--before` prints kept ones next to the new ones.
"""

import ast
import dataclasses
import graphlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from benchmarks.lines import by_function, count
from examples.trainer.system.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "optax_muonplus"

POLAR_ARGUMENTS = {"ns_coeffs", "ns_steps", "eps", "polar", "preconditioning", "compute_dtype"}
REPEATS = 4  # a signature with so many of them repeats the polar arguments
DESCRIBE_A_LEAF = {  # classes, and what each of them says of one leaf
    "MatrixSpec": "its axes, which a user gives",
    "Reading": "its axes, and the rule that says them",
    "Readings": "how all leaves were read",
    "Rule": "which leaves, and their axes",
    "MatrixLayout": "its axes as a list of matrices",
    "LeafSharding": "which of its axes the mesh cuts",
    "LeafInfo": "path, shape, dtype, matrices and sharding",
    "ResolvedTree": "the records of all leaves",
    "Member": "its matrices on the mesh",
    "MatrixGroup": "leaves of one shape and sharding",
    "GroupSize": "how many matrices such a group has",
    "Segment": "a range of the matrices of a group",
    "Task": "a range that one device works on",
    "MatrixBatch": "its matrices, and how to read them",
    "_ItemLayout": "how its matrices lie in a message",
}
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
    rounds: int = 7
    """How often updates are traced to measure the time."""


def main(config: Config) -> None:
    """Measures, prints the tables and writes the figures."""
    root = config.path.resolve()
    if not (root / LIBRARY).is_dir():
        raise SystemExit(f"{root} has no folder {LIBRARY}: give a checkout of it as --path.")
    figures = {"commit": commit(root)} | sizes(root) | shape(root / LIBRARY)
    figures |= run_ways(root, config.rounds)
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


def shape(package: Path) -> Figures:
    """Counts rooms, floors, imports between rooms, repeated arguments and records of leaves."""
    files = modules(package)
    trees = {module: ast.parse(path.read_text()) for module, path in files.items()}
    crossing = {
        (module, other)
        for module, tree in trees.items()
        for other in imported(tree, files)
        if room_of(other) != room_of(module)
    }
    below: dict[str, set[str]] = {room_of(module): set() for module in files}
    for module, other in crossing:
        below[room_of(module)].add(room_of(other))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return {
        "rooms": len(below),
        "floors": floors(below),
        "arrows between rooms": sum(map(len, below.values())),
        "imports of another room": len(crossing),
        "imports past a door": sum(other != room_of(other) for _, other in crossing),
        "signatures with the polar arguments": sorted(filter(None, map(repeats, nodes))),
        "records": sum(isinstance(x, ast.ClassDef) and is_record(x) for x in nodes),
        "types that describe a leaf": sorted(DESCRIBE_A_LEAF.keys() & classes),
    }


def imported(tree: ast.AST, files: Mapping[str, Path]) -> set[str]:
    """Finds the modules of the library that a file imports, anywhere in it.

    The library itself does not count: `integrations` uses it as every user does.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = [name.partition(".")[2] for name in names if name.partition(".")[0] == LIBRARY]
    parents = [name if name in files else name.rpartition(".")[0] for name in own]
    return {parent for parent in parents if parent}


def floors(below: Mapping[str, set[str]]) -> int:
    """Counts the rooms on the longest path of imports."""
    height: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(below).static_order():
        height[room] = 1 + max((height[other] for other in below[room]), default=0)
    return max(height.values())


def repeats(node: ast.AST) -> str:
    """Returns the name of a function or class that repeats the polar arguments, else ""."""
    match node:
        case ast.FunctionDef(name=name, args=args):
            given = {x.arg for x in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
        case ast.ClassDef(name=name, body=body):
            fields = [x.target for x in body if isinstance(x, ast.AnnAssign)]
            given = {target.id for target in fields if isinstance(target, ast.Name)}
        case _:
            return ""
    return name if len(given & POLAR_ARGUMENTS) >= REPEATS else ""


def is_record(node: ast.ClassDef) -> bool:
    """Tells whether a class is a NamedTuple or a dataclass, by its bases and decorators."""
    words = ast.unparse(ast.Tuple([*node.bases, *node.decorator_list], ast.Load()))
    return any(word in words for word in ("NamedTuple", "dataclass", "matrix_function"))


# Ways -------------------------------------------------------------------------------------------


def run_ways(root: Path, rounds: int) -> Figures:
    """Measures what runs, in a process that imports the library of the checkout."""
    file = Path(__file__).with_name("ways.py")
    done = subprocess.run(
        [sys.executable, "-P", str(file), str(root), str(rounds)],
        cwd=root,
        env=os.environ
        | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    for figure in figures.values():
        if "entered" in figure:
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
