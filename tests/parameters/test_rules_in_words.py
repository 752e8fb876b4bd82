"""The words that default rules are written in: what they mean, and which of them are refused."""

import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from optax_muonplus.trees.rules import DEFAULT_RULES, adamw, matrix


@pytest.mark.parametrize(
    ("layout", "numbers", "fitting", "other"),
    [
        ("in, out", Dims(0, 1), (4, 6), (4, 6, 1)),
        ("weight: out, in", Dims(1, 0), (4, 6), (4,)),
        ("in, (heads head)", Dims(0, (1, 2)), (4, 2, 3), (4, 6)),
        ("(heads head), out", Dims((0, 1), 2), (2, 3, 4), (4, 6)),
        ("heads, in, head", Dims(1, (0, 2)), (2, 4, 3), (4, 6)),
        ("part, heads, in, head", Dims(2, (1, 3)), (2, 2, 4, 3), (2, 4, 3)),
        ("(heads head), rank", Dims((0, 1), 2), (2, 3, 4), (4, 6)),
        ("rank, (heads head)", Dims(0, (1, 2)), (4, 2, 3), (4, 6)),
        ("rank, out", Dims(0, 1), (2, 4), (2,)),
        ("expert, in, out", Dims(1, 2), (5, 4, 6), (4, 6)),
        ("(1 1 in), out", Dims((0, 1, 2), 3), (1, 1, 4, 6), (1, 3, 4, 6)),
        ("out, (in side side)", Dims((1, 2, 3), 0), (6, 4, 3, 3), (6, 4, 3, 2)),
    ],
)
def test_layouts_are_dimension_numbers_and_restrict_shapes(layout, numbers, fitting, other):
    rule = matrix("kernel", layout if ": " in layout else f"it: {layout}", "Flax")
    assert rule.dimension_numbers == numbers
    assert rule.reads.endswith(f"{layout} (Flax)")
    assert rule.fits("up/kernel", fitting)
    assert not rule.fits("up/kernel", other)


@pytest.mark.parametrize(
    ("names", "fitting", "other"),
    [
        ("kernel|w", ("kernel", "up/w"), ("up/my_kernel", "kernel/x", "Kernel")),
        ("(?i)*expert*/kernel", ("a/Experts_1/kernel",), ("experts/up/kernel", "kernel")),
        ("*/b", ("up/b", "a/up/b"), ("b", "up/ab")),
        ("**", ("", "a/b"), ()),
        ("^(a/)?head(/*)?", ("head", "a/head/w"), ("b/head", "head/w/x")),
    ],
)
def test_names_are_whole_names_at_the_end_of_a_path(names, fitting, other):
    rule = matrix(names, "it: in, out")
    assert [name for name in (*fitting, *other) if rule.fits(name, (4, 6))] == [*fitting]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("in", "does not say which axes are inputs and which are outputs"),
        ("inn, out", "does not say which axes are inputs"),
        ("in, out, rank", "does not say which axes are inputs"),
        ("expert, layer", "does not say which axes are inputs"),
        ("in, in", "names a side twice"),
        ("(in out), rank", "names a side twice"),
        ("in (heads head)", r"'in \(heads head\)' where one axis, or several in parentheses"),
        ("in, (heads)", "where one axis"),
        ("in,out", "where one axis"),
        ("", "where one axis"),
    ],
)
def test_layouts_that_say_nothing_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        matrix("x", f"it: {layout}")


def test_rules_for_adamw_may_restrict_shapes():
    rule = adamw("kernel", "depthwise", "width, 1, channels", "Flax")
    assert rule.dimension_numbers is None and rule.reads == "depthwise (Flax)"
    assert rule.fits("kernel", (3, 1, 8)) and not rule.fits("kernel", (3, 2, 8))
    assert adamw("kernel", "norm").fits("kernel", (3, 2, 8))


def test_only_the_last_default_rule_takes_any_matrix():
    assert DEFAULT_RULES[-1].fits("anything", (4, 6))
    assert not any(rule.fits("anything", (4, 6)) for rule in DEFAULT_RULES[:-1])
