"""Imports among the packages in `examples` run one way, in the order that its docstring shows."""

import re

import pytest

import examples
from tests.support.documents import ROOT, imported

FOLDER = ROOT / "examples"
# Folders of files that import no package.
FOLDERS = ("hosts", "launch", "submissions")
COMMANDS = {"contrasts", "data", "export", "finetune", "generate", "parity"}
COMMANDS |= {"perplexity", "report", "sweep", "tasks", "train"}


def packages():
    """`trainer.system`, ... in order; the modules that lie in a house itself are its first one."""
    lines = re.findall(r"^    (\w+): (.*)$", examples.__doc__, re.M)
    return [
        house if name == "." else f"{house}.{name}"
        for house, names in lines
        for name in names.split(", ")
    ]


def package_of(module):
    """The package of a dotted name within `examples`; None for a command or script."""
    first, _, rest = module.partition(".")
    inner = f"{first}.{rest.partition('.')[0]}"
    if inner in packages():
        return inner
    return first if (FOLDER / first).is_dir() else None


def imports_of(path):
    prefix = "examples."
    return [name.removeprefix(prefix) for name in imported(path) if name.startswith(prefix)]


def test_every_package_is_in_the_order():
    found = {
        package_of(".".join(path.relative_to(FOLDER).with_suffix("").parts))
        for path in FOLDER.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert found == {*packages(), *FOLDERS, None}


@pytest.mark.parametrize("package", packages())
def test_packages_import_only_those_before_them(package):
    order = packages()
    for path in FOLDER.rglob("*.py"):
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        if package_of(module) == package:
            for name in imports_of(path):
                other = package_of(name)
                assert other in order, f"{module} imports {name}"
                assert order.index(other) <= order.index(package), f"{module} imports {name}"


def test_only_commands_import_packages():
    inner = (path for name in FOLDERS for path in (FOLDER / name).rglob("*.py"))
    for path in [*FOLDER.glob("*.py"), *inner]:
        if path.stem not in COMMANDS:
            assert not imports_of(path), path


def test_readme_lists_the_packages_in_this_order():
    text = (FOLDER / "README.md").read_text().split("## Where to look")[1]
    listed = re.findall(r"^\| `(\w+)/` \|", text, re.M)
    assert listed == [package.rpartition(".")[2] for package in packages()]
