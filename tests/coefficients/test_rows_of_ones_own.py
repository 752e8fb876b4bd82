"""Rows that are passed in place of a table's name: how many, and those of Dion."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.coefficients import polar_express, relaxed, resolve


@pytest.mark.parametrize("rows", [polar_express(8), relaxed(7), [(2.0, -1.5, 0.5)] * 6])
def test_more_rows_than_steps_are_refused(rows):
    """The last ones bring singular values to 1. Optax refuses them too."""
    n = len(rows)
    message = (
        rf"has {n} rows, of which ns_steps=5 would leave out the last {n - 5}.*"
        rf"ns_steps={n}, or 5 rows, as polar_express\(5\)"
    )
    for make in (resolve, omp.polar.Orthogonalize, lambda x: omp.muonplus(0.1, ns_coeffs=x)):
        with pytest.raises(ValueError, match=message):
            make(rows)
    with pytest.raises(ValueError, match="would leave out"):
        omp.describe({}, ns_coeffs=rows)
    assert len(resolve(rows, n).rows) == n
    assert resolve(rows[:5]).rows == tuple(rows[:5])


def test_tables_by_name_and_single_rows_go_with_any_steps():
    assert len(resolve("polar_express", 5).rows) == len(resolve("you", 5).rows) == 5
    assert len(resolve((2.0, -1.5, 0.5), 5).rows) == 5


@pytest.mark.parametrize("steps", [0, 2.5, "5", True])
def test_generators_take_whole_numbers(steps):
    for make in (polar_express, relaxed):
        with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
            make(steps)


def test_rows_of_dion_are_ours_with_its_safety_in_the_first():
    """As docs/start/from_pytorch.md says; the table by the same name is another one."""
    first, *others = polar_express(5, cushion=0.02, safety=0.02)
    x = np.random.default_rng(0).normal(size=(24, 40))
    expected = x / (1.02 * np.linalg.norm(x))
    for a, b, c in [first, *others]:
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    rows = [tuple(c / 1.02**k for c, k in zip(first, (1, 3, 5), strict=True)), *others]

    def difference(ns_coeffs):
        found = omp.polar.Orthogonalize(ns_coeffs)(jnp.asarray(x, jnp.float32))
        return np.abs(found - expected).max() / np.abs(expected).max()

    assert difference(rows) < 1e-5  # float32 against float64
    assert 0.1 < difference("polar_express") < 0.3
