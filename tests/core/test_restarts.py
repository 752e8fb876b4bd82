"""Where the Gram iteration restarts: the listed choices follow the rule."""

import functools

import pytest

from optax_muonplus import coefficients
from tests.support import restarts


@pytest.mark.parametrize("name", coefficients.TABLES)
def test_listed_restarts_follow_the_rule(name):
    table = coefficients.TABLES[name]
    longest = 8 if table.repeats_last else len(table.rows)
    for steps in range(1, longest + 1):
        listed = table.restarts(steps)
        assert listed, f"{name} lists restarts of {steps} steps: fewest_restarts finds them"
        rows = (table.rows + table.rows[-1:] * steps)[:steps]
        assert listed.float32 == restarts.fewest_restarts(rows), (name, steps)
    assert table.restarts(longest + 1) is None


@pytest.mark.parametrize(
    "table, steps, chosen, condition",
    [
        ("jordan", 5, (3,), 62.5),
        ("dion", 5, (2,), 53.2),
        ("you", 6, (2,), 179),
        ("polar_express", 5, (1,), 630),
        ("polar_express", 6, (1, 2), 145),
        ("polar_express", 8, (1, 3), 170),
    ],
)
def test_the_rule_makes_the_published_choices(table, steps, chosen, condition):
    """With float16's error it makes the published autotuner's choices (its own run, CPU)."""
    rows = coefficients.for_steps(table, steps).rows
    float16 = functools.partial(restarts.condition, rows, error=4e-4)
    assert float16(chosen) == pytest.approx(condition, rel=0.01)
    others = [(i,) for i in range(1, steps)] if len(chosen) == 1 else [(1, 3), (1, 2), (2, 3)]
    assert min(others, key=float16) == chosen
