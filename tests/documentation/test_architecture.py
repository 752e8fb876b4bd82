"""The house rule: imports run strictly downwards, and each floor sees only what it may."""

import ast
import inspect
import pathlib
import sys

import pytest

import optax_muonplus

PACKAGE = pathlib.Path(optax_muonplus.__file__).parent
ROOT = PACKAGE.parent

# A module may import from lines above its own, never from its own line or below. The first set of
# lines is floor 0, then 1, 2 and 3.
FLOORS = [
    [
        {"minimax", "precision", "orientation", "power_iteration"},
        {"restarts", "normalization", "products", "crossings"},
        {"coefficients", "shape_factor"},
        {"amplification"},
        {"variance_shift"},
        {"newton_schulz"},
        {"polar"},
        {"steps", "imbalance"},
        {"measures"},
    ],
    [
        {"paths", "grouping", "assignment"},
        {"routes"},
        {"dimension_numbers", "placement"},
        {"partition", "exchange"},
        {"sharded"},
        {"lifting", "table", "selection"},
    ],
    [
        {"transforms", "curvature", "recording"},
        {"descent", "replay", "readout"},
        {"theory", "diagnostics"},
    ],
    [{"optimizers"}],
    # Each is a rule, its link and its alias in one file.
    [
        {f"baselines.{name}" for name in ("adamuon", "mano", "normuon", "turbo_muon")},
        {"baselines"},
    ],
    [{"__init__"}],
]
# What a floor may import from outside, besides the standard library.
OUTSIDE = [
    {"jax", "numpy"},
    {"jax", "numpy", "optax", "optax.contrib"},
    {"jax", "optax"},
    {"optax"},
    {"jax", "optax"},
    set(),
]
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(module):
    """Full names of what a module of the package imports."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module == PACKAGE.name:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_module_has_its_line():
    placed = set().union(*(line for floor in FLOORS for line in floor))
    assert placed == MODULES.keys()


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_imports_run_downwards(floor):
    below = set().union(*(line for lower in FLOORS[:floor] for line in lower))
    for line in FLOORS[floor]:
        for module in line:
            for name in imports(module):
                first, _, rest = name.partition(".")
                if first == PACKAGE.name:
                    own = rest if rest in MODULES else rest.rpartition(".")[0] or rest
                    assert own in below, f"{module} imports {rest}"
                elif first not in sys.stdlib_module_names:
                    allowed = OUTSIDE[floor]
                    assert name in allowed or first in allowed, f"{module} imports {name}"
        below |= line


def test_public_names_are_documented_and_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    public = [name for name in vars(optax_muonplus) if not name.startswith("_")]
    shown = ("baselines", "coefficients", "diagnostics", "polar", "theory")
    exported = [name for name in public if name not in MODULES or name in shown]
    for name in exported:
        assert inspect.getdoc(getattr(optax_muonplus, name)), name
        assert name in readme, f"{name} is not in the README"


def test_files_have_names_that_say_something():
    said_nothing = {"utils", "helpers", "common", "misc"}
    for folder in ("optax_muonplus", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.stem not in said_nothing, path
