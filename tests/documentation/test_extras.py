"""`.ci/extras` has an environment for whatever else is skipped."""

import importlib.machinery
import importlib.util
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def extras():
    """The command, as a module."""
    loader = importlib.machinery.SourceFileLoader("extras", str(ROOT / ".ci" / "extras"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("extras", loader))
    sys.modules["extras"] = module  # where its dataclasses look for themselves
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    yield module
    del sys.modules["extras"]


def test_every_file_that_asks_for_a_package_or_an_extra_is_run_somewhere(extras):
    given = {path for each in extras.ENVIRONMENTS.values() for path in each.tests}
    assert all((ROOT / path).exists() for path in given)
    given -= {"tests", "lab/tests"}
    files = [path for tests in ("tests", "lab/tests") for path in (ROOT / tests).rglob("test_*.py")]
    files.remove(pathlib.Path(__file__))
    for file in files:
        asks = re.search(r"importorskip|needs requirements/|allow_module_level", file.read_text())
        path = file.relative_to(ROOT).as_posix()
        assert not asks or any(path.startswith(each) for each in given), path


def test_the_tests_of_the_installed_package_exist():
    listed = (ROOT / ".ci" / "core-tests").read_text().split()
    assert listed and all((ROOT / name.partition("::")[0]).exists() for name in listed)


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "..\n2 passed in 1s", "passed: 2 passed in 1s"),
        (0, "ss\nSKIPPED [2] tests/a.py:3: no keras\n2 skipped in 1s", "nothing was run: 2 skip"),
        (5, "no tests ran in 1s", "nothing was run: no tests ran"),
        (1, "F\nFAILED tests/a.py::b\n1 failed in 1s", "FAILED: 1 failed in 1s (FAILED tests/a."),
        (2, "No module named pytest", "FAILED: No module named pytest"),
    ],
)
def test_one_line_says_what_pytest_said(extras, status, said, outcome):
    assert extras.judged(status, said).startswith(outcome)
