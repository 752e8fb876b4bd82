"""Files stay under 400 lines and functions under 40, and files have names that say something."""

import ast

import pytest

from tests.support.documents import ROOT

FILE_LINES, FUNCTION_LINES = 400, 40
FOLDERS = ("optax_muonplus", "examples", "benchmarks", "docs", "tests")
EMPTY_NAMES = {"utils", "helpers", "common", "misc"}


def lines_of_body(function):
    """From the first statement after the docstring to the last: no decorators, no signature."""
    documented = ast.get_docstring(function) is not None
    statements = function.body[documented:]
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


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
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines_of_body(node)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_file_names_say_something(folder):
    names = {path.stem for path in (ROOT / folder).rglob("*.py")}
    assert names and not names & EMPTY_NAMES
