"""The packages of the examples import one way, and commands import packages only."""

import ast
import pathlib
import re

import pytest

import examples

ROOT = pathlib.Path(examples.__file__).parent
FILES = {path.relative_to(ROOT): path for path in ROOT.rglob("*.py")}
# The order that the docstring of `examples` and the table in its README state.
ORDER = re.findall(r"\w+", examples.__doc__.strip().splitlines()[-1])


def imports(path):
    """The full names of the modules that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_has_its_place_in_the_order():
    assert set(ORDER) == {path.parts[0] for path in FILES if len(path.parts) > 1}


def test_readme_lists_the_packages_in_this_order():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", readme, re.M) == ORDER


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_run_one_way(file):
    """A package imports from earlier ones and itself, a command or script from packages."""
    package = file.parts[0] if len(file.parts) > 1 else None
    allowed = ORDER if package is None else ORDER[: ORDER.index(package) + 1]
    for name in imports(FILES[file]):
        first, *rest = name.split(".")
        if first == "examples":
            assert rest and rest[0] in allowed, f"{file} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_only_public_modules_of_the_library_are_used(file):
    for name in imports(FILES[file]):
        if name.startswith("optax_muonplus."):
            assert not any(part.startswith("_") for part in name.split(".")), f"{file}: {name}"
