"""Imports between the library's rooms run strictly downwards."""

import ast
import graphlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import optax_muonplus
from tests.support.documents import ROOT, imported

PACKAGE = pathlib.Path(optax_muonplus.__file__).parent
# A room imports rooms of the lines above its own only.
FLOORS = """
_core _leaves
_chain _params
_execution int8 coefficients
_links heads rules
zero1 bfloat16 matrices polar
transforms
muonplus contrib convert
describe
__init__
"""
FLOOR = {room: i for i, line in enumerate(FLOORS.strip().splitlines()) for room in line.split()}
OUTSIDE = {"jax", "numpy", "optax"}
# By dotted name within the package; a package's __init__.py has the package's name.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def room_of(module):
    """A room is a folder of the package, a module beside them, or a file that has its own floor."""
    return module if module in FLOOR else module.partition(".")[0]


def rooms():
    return sorted({room_of(module) for module in MODULES})


def imported_modules(module):
    """Modules of the library that one of them imports."""
    for name in imported(MODULES[module]):
        first, _, rest = name.partition(".")
        if first == PACKAGE.name and rest:
            own = rest if rest in MODULES else rest.rpartition(".")[0]
            assert own in MODULES, f"{module} imports {name}"
            yield own


def string_imports(code):
    """The ways in ``code`` to import a module by a name that is computed."""
    ways = {"importlib", "pkgutil", "runpy", "__import__", "import_module", "exec", "eval"}
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(node, ast.Import)]
        names += [getattr(node, key, None) for key in ("id", "attr", "module")]
        yield from ways.intersection(name.partition(".")[0] for name in names if name)


def test_every_room_has_its_floor():
    assert sorted(FLOOR) == rooms()


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_from_lower_floors_only(room):
    for module in MODULES:
        for other in imported_modules(module) if room_of(module) == room else ():
            if room_of(other) != room:
                below = FLOOR[room_of(other)] < FLOOR[room]
                assert below, f"{module} imports {other}, which is not on a lower floor"


def test_the_library_needs_jax_and_optax_alone():
    """NumPy comes with them."""
    for module, path in MODULES.items():
        for name in imported(path):
            first = name.partition(".")[0]
            if first != PACKAGE.name and first not in sys.stdlib_module_names:
                assert first in OUTSIDE, f"{module} imports {name}"


def test_imports_within_functions_count():
    for module, later in (("_links.links", "int8"), ("muonplus", "zero1"), ("__init__", "contrib")):
        code = ast.parse(MODULES[module].read_text())
        assert not any(isinstance(x, ast.ImportFrom) and later in str(x.module) for x in code.body)
        assert later in {room_of(other) for other in imported_modules(module)}


@pytest.mark.parametrize("module", MODULES)
def test_no_import_is_a_string(module):
    """It would hide from the tests of this file, which read statements, also within functions."""
    assert not [*string_imports(MODULES[module].read_text())]


@pytest.mark.parametrize("code", ["import importlib", "x = __import__('os')", "exec('import os')"])
def test_string_imports_are_found(code):
    assert [*string_imports(f"def function():\n    {code}")]
    assert not [*string_imports("def function():\n    from os import path\n    return path")]


def test_modules_do_not_import_in_circles():
    graph = {module: set(imported_modules(module)) - {module} for module in MODULES}
    order = tuple(graphlib.TopologicalSorter(graph).static_order())  # raises on a circle
    assert set(order) == MODULES.keys()


def test_the_core_runs_alone(tmp_path):
    """Copied into an empty folder, with JAX beside it, "_core" computes an update."""
    shutil.copytree(PACKAGE / "_core", tmp_path / "core")
    program = """
import sys, jax.numpy as jnp, core
update, momentum = core.muon_plus(jnp.eye(2, 3), jnp.zeros((2, 3)))
assert update.shape == momentum.shape == (2, 3) and jnp.abs(update).max() > 0.5
assert not {"optax_muonplus", "optax"} & set(sys.modules)"""
    command = [sys.executable, "-P", "-c", program]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


def test_contrib_imports_what_users_import():
    """It is written as a user's own rule or recorder would be, and shows that it can be."""
    room, doors = "contrib", {*dir(optax_muonplus)} - {"contrib"} | {"__init__"}
    for module in MODULES:
        for other in imported_modules(module) if room_of(module) == room else ():
            assert room_of(other) == room or other in doors, f"{module} imports {other}"


@pytest.mark.parametrize("folder", ["examples", "lab"])
def test_only_public_modules_are_used_outside_the_library(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for name in imported(path):
            if name.partition(".")[0] == PACKAGE.name:
                private = [part for part in name.split(".") if part.startswith("_")]
                assert private in ([], ["__version__"]), f"{path} imports {name}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("omp."):
                # Dunder names are not private, nor is _asdict of what a call returned.
                private = re.search(r"^[^(]*\._(?!_)", ast.unparse(node))
                assert not private, f"{path} uses {ast.unparse(node)}"


@pytest.mark.parametrize("folder", ["optax_muonplus", "examples", "tests"])
def test_nothing_imports_the_laboratory(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert "lab" not in {name.partition(".")[0] for name in imported(path)}, path


def test_no_test_imports_a_test():
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "lab/tests").rglob("*.py")]:
        for name in imported(path):
            parts = name.split(".")
            if "tests" in parts[:2] or parts[0].startswith("test_"):
                found = [part for part in parts if part.startswith("test_")]
                assert not found, f"{path} imports {name}"
