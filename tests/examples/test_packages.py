"""The packages of the examples import one way, and commands import packages only."""

import pathlib
import re

import examples
from tests.support.documents import imported

ROOT = pathlib.Path(examples.__file__).parent
FILES = {path.relative_to(ROOT): path for path in ROOT.rglob("*.py")}
# The order that the docstring of `examples` and the table in its README state.
ORDER = re.findall(r"\w+", examples.__doc__.strip().split("\n\n")[-1])


def test_every_package_has_its_place_in_the_order():
    assert set(ORDER) == {path.parts[0] for path in FILES if len(path.parts) > 1}


def test_readme_lists_the_packages_in_this_order():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", readme, re.M) == ORDER


def test_imports_run_one_way():
    """A package imports from earlier ones and itself, a command or script from packages."""
    for file, path in FILES.items():
        is_packaged = len(file.parts) > 1
        allowed = ORDER[: ORDER.index(file.parts[0]) + 1] if is_packaged else ORDER
        for name in imported(path):
            first, *rest = name.split(".")
            if first == "examples":
                assert rest and rest[0] in allowed, f"{file} imports {name}"
