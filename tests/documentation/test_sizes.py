"""Files stay under 400 lines and functions under 40, and files have names that say something."""

import ast

import pytest

from tests.support.documents import ROOT

FILE_LINES, FUNCTION_LINES = 400, 40
FOLDERS = ("optax_muonplus", "examples", "benchmarks", "docs", "tests")
# A run is read in one place, from its first step to its last.
LONG = {"execute": ("examples/trainer/runs/loop.py", 70)}
EMPTY_NAMES = {"utils", "helpers", "common", "misc"}


def lines_of_body(function):
    """From the first statement after the docstring to the last: no decorators, no signature."""
    documented = ast.get_docstring(function) is not None
    statements = function.body[documented:]
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


def most_lines(path, name):
    long, most = LONG.get(name, ("", FUNCTION_LINES))
    return most if path == long else FUNCTION_LINES


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_short(folder):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short(folder):
    too_long, seen = [], 0
    for file in (ROOT / folder).rglob("*.py"):
        path = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                seen += 1
                if lines_of_body(node) > most_lines(path, node.name):
                    too_long.append(f"{path}:{node.lineno} {node.name}")
    assert seen and too_long == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_file_names_say_something(folder):
    names = {path.stem for path in (ROOT / folder).rglob("*.py")}
    assert names and not names & EMPTY_NAMES
