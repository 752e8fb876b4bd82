"""Coefficient tables against published numbers and the mathematics that made them."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import coefficients
from tests.support import reference_coefficients

# Of modded-nanogpt and Dion, with their safety of 0.02 in all rows but the last.
MODDED_NANOGPT = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def test_it_takes_the_first_rows_and_repeats_a_single_one():
    assert coefficients.for_steps("you", 2).rows == coefficients.TABLES["you"].rows[:2]
    assert coefficients.for_steps((2, -1.5, 0.5), 3).rows == ((2, -1.5, 0.5),) * 3
    own = ((3, -3.2, 1.2), (2, -1.5, 0.5))
    assert coefficients.for_steps(own, 2).rows == own
    assert coefficients.for_steps("standard", 5) == coefficients.for_steps("jordan", 5)
    assert coefficients.for_steps("jordan", np.int64(5)) == coefficients.for_steps("jordan", 5)


def test_polar_express_is_the_best_polynomial_for_what_each_step_is_given():
    """Its error about 1 equioscillates, and is centred on 1 after the lower end was raised.

    Amsel et al., arXiv:2505.16932, Algorithm 1; the bounds are those of the list that they print.
    """
    low, high = 1e-3, 1.0
    for row in reference_coefficients.POLAR_EXPRESS_AS_PRINTED:
        x = np.linspace(max(low, 0.02407327424182761 * high), high, 200_001)
        values = x * np.polynomial.polynomial.polyval(x * x, row)
        middle, bound = (values.max() + values.min()) / 2, (values.max() - values.min()) / 2
        if bound > 1e-7:  # the interval of the last two is a point, to rounding
            reached = np.sign(values - middle)[np.abs(values - middle) > bound * (1 - 1e-6)]
            assert 1 + np.count_nonzero(np.diff(reached)) == 4
        low = low * np.polynomial.polynomial.polyval(low**2, row)
        assert low + values.max() == pytest.approx(2, abs=1e-7)
        high = 2 - low
    scale = 1.01 ** np.array([1, 3, 5])
    *first, last = reference_coefficients.POLAR_EXPRESS_AS_PRINTED
    expected = [*(np.array(row) / scale for row in first), last]
    np.testing.assert_allclose(coefficients.TABLES["polar_express"].rows, expected, rtol=1e-15)


def test_cubic_brings_what_each_step_is_given_as_close_together_as_cubics_can():
    """Both ends become one value, and the largest is 1.3 (Huang, arXiv:2606.00371)."""
    low, high = 7e-3, 1.0
    for a, b in coefficients.TABLES["cubic"].rows[:5]:
        largest = 2 / 3 * a * np.sqrt(a / (-3 * b))
        assert largest == pytest.approx(1.3, abs=1e-6)
        low, end = (a * x + b * x**3 for x in (low, high))
        assert low == pytest.approx(end, rel=1e-4)  # printed with seven digits
        high = largest


def test_cubic_goes_on_with_the_cubics_that_are_closest_to_one():
    table = coefficients.TABLES["cubic"].rows
    np.testing.assert_allclose(table[:8], reference_coefficients.cubic(8), rtol=1e-12)
    assert table[8] == (1.5, -0.5)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: coefficients.for_steps("muonn", 5),
            "Unknown ns_coeffs 'muonn'. Known: jordan",
        ),
        (lambda: coefficients.for_steps("you", 7), "6 rows, too few for ns_steps=7.*polar_express"),
        (lambda: coefficients.for_steps("dion", 6), "ns_steps=5 or fewer"),
        (lambda: coefficients.for_steps([(2, -1.5, 0.5)] * 2, 3), "2 rows, too few"),
        (lambda: coefficients.for_steps("jordan", 0), "from 1 to 100, got 0"),
        (lambda: coefficients.for_steps("jordan", 2.5), "integer from 1 to 100, got 2.5"),
        (lambda: coefficients.for_steps((1.0,), 5), "at least two numbers"),
        (lambda: coefficients.for_steps([[(1, 2, 3)]], 5), r"of one length; got \[\[\(1, 2, 3"),
    ],
)
def test_invalid_coefficients_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "rows", [(*coefficients.TABLES["dion"].rows, (1.5, -0.5, 0.0)), [(1.5, -0.5)] * 7]
)
def test_more_rows_than_steps_are_refused(rows):
    """The last ones bring singular values to 1. Optax refuses them too."""
    n = len(rows)
    message = (
        rf"has {n} rows, but ns_steps=5 would leave out the last {n - 5}.*"
        rf"ns_steps={n}, or 5 rows"
    )
    for make in (
        coefficients.for_steps,
        omp.polar.Orthogonalize,
        lambda x: omp.muonplus(0.1, ns_coeffs=x),
    ):
        with pytest.raises(ValueError, match=message):
            make(rows)
    with pytest.raises(ValueError, match="would leave out"):
        omp.describe({}, ns_coeffs=rows)
    assert len(coefficients.for_steps(rows, n).rows) == n
    assert coefficients.for_steps(rows[:5]).rows == tuple(rows[:5])


def test_rows_of_dion_are_ours_with_its_safety_in_the_first():
    """As docs/start/from_pytorch.md says; the table by the same name is another one."""
    first, *others = MODDED_NANOGPT
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
