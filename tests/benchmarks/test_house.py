"""`benchmarks.house` counts what stands in files, and `benchmarks.ways` what runs."""

import importlib.util
import textwrap

import pytest

import optax_muonplus as omp
from benchmarks import house, lines, ways

DOCUMENTED = '''\
"""Of the module,
in two lines."""

import os  # a comment after code


# a comment
class A:
    """Of the class."""

    x: int = 0
    """Of the field."""


def f(a,
      b):

    return """a value,
    which is code"""
'''


def test_code_lines_are_neither_blank_nor_comments_nor_documentation():
    assert sorted(lines.code_lines(DOCUMENTED)) == [4, 8, 11, 15, 16, 18, 19]


def package(folder, files):
    for name, text in files.items():
        path = folder / house.LIBRARY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder / house.LIBRARY


ROOMS = {
    "__init__.py": "from optax_muonplus.upper import f as f\n",
    "upper/__init__.py": "from optax_muonplus.upper._f import f as f\n",
    "upper/_f.py": """
        import optax_muonplus.lower._g
        from optax_muonplus.lower import g
        from optax_muonplus.lower._g import g, h

        def f(polar, eps, ns_steps, *, ns_coeffs):
            from optax_muonplus._words import WORD

        def few(polar, eps, ns_steps): ...
        """,
    "lower/__init__.py": "from optax_muonplus.lower._g import g as g",
    "lower/_g.py": """
        class Orthogonalize:
            ns_coeffs: str
            eps: float
            polar: str
            preconditioning: str
        class Reading(NamedTuple): ...
        class Error(ValueError): ...
        """,
    "_words.py": "WORD = 1",
}


def test_shape_of_a_package(tmp_path):
    assert house.shape(package(tmp_path, ROOMS)) == {
        "rooms": 4,
        "floors": 3,
        "arrows between rooms": 3,
        "imports of another room": 4,
        "imports past a door": 1,
        "signatures with the polar arguments": ["Orthogonalize", "f"],
        "records": 1,
        "types that describe a leaf": ["Reading"],
    }


def test_sizes_by_room_and_by_folder(tmp_path):
    package(tmp_path, ROOMS)
    (tmp_path / "empty").mkdir()
    found = house.sizes(tmp_path)
    assert found["room _words"] == found["room __init__"] == {"lines": 1, "code": 1}
    assert found["room upper"]["lines"] == 1 + 9 and found["room upper"]["code"] == 1 + 6
    rooms = [size["lines"] for name, size in found.items() if name.startswith("room ")]
    assert found[f"folder {house.LIBRARY}"]["lines"] == sum(rooms)
    assert "folder empty" not in found


CALLED = '''
def outer():
    """Documented."""
    [f(x) for x in (1, 2)]
    (lambda: f(3))()

    def inner():
        return 4

    return inner()
'''


def test_calls_switches_and_lines_of_what_was_entered(tmp_path):
    (tmp_path / "b.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "a.py").write_text("from b import f\n" + CALLED)
    modules = {}
    for name in "ba":
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        modules[name] = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            for other, module in modules.items():
                patch.setitem(ways.sys.modules, other, module)
            spec.loader.exec_module(modules[name])
    calls = ways.calls_of(modules["a"].outer, tmp_path)
    assert [call.name for call in calls] == ["outer", "f", "f", "f", "inner"]
    counted = ways.passed(calls)
    assert (counted["calls"], counted["switches of file"]) == (5, 2)
    # `inner` counts as itself: 4 + 2 + 2.
    assert house.extent(counted["entered"]) == {"files": 2, "functions": 3, "code": 8}
    assert ways.calls_of(modules["a"].outer, tmp_path / "elsewhere") == []
    below = ways.calls_of(modules["a"].outer, tmp_path.parent, without=tmp_path)
    assert below == []


def test_walks_of_a_tree_are_counted_by_who_asks(tmp_path):
    (tmp_path / "walker.py").write_text(
        "import jax\n\ndef walk(tree):\n"
        "    jax.tree_util.tree_leaves_with_path(tree)\n"
        "    jax.tree_util.tree_map_with_path(lambda path, x: x, tree)\n"
    )
    spec = importlib.util.spec_from_file_location("walker", tmp_path / "walker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert ways.walks_of(lambda: module.walk({"a": 1}), tmp_path) == 2
    assert ways.walks_of(lambda: module.walk({"a": 1}), tmp_path / "elsewhere") == 0


def test_decorators_are_lines_of_their_function():
    text = "@first\n# comment\n@second\ndef f():\n    pass\n"
    assert lines.by_function(text) == {1: 4}


def test_a_traced_update_passes_the_library():
    shapes = {"kernel": ways.leaf((8, 16)), "bias": ways.leaf((16,))}
    trace = ways.tracer(omp.muonplus(0.02), shapes)
    calls = ways.calls_of(trace, house.ROOT / house.LIBRARY)
    assert len(calls) > 50
    assert [call.name for call in ways.calls_of(trace, house.ROOT / house.LIBRARY)] == [
        call.name for call in calls
    ]  # each time anew
