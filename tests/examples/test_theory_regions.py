"""The map g and its slope against a hundred digits, and where steps amplify or reduce imbalance."""

import numpy as np
import pytest

from examples.experiments.theory import regions as theory
from optax_muonplus import coefficients
from tests.support import reference, reference_coefficients
from tests.support import reference_theory as exact
from tests.support.spectra import COMPOSED, PAPER, interior_ends

STEPS = {
    "jordan": reference_coefficients.JORDAN,
    "paper's example": [PAPER],
    "you": reference_coefficients.YOU,
    "polar express": reference_coefficients.POLAR_EXPRESS_AS_PRINTED,
    "dion": reference_coefficients.DION,
}


@pytest.mark.parametrize("ns_coeffs, steps", COMPOSED)
def test_maps_and_slope_agree_with_a_hundred_digits(ns_coeffs, steps):
    rows = coefficients.for_steps(ns_coeffs, steps).rows
    lam = np.concatenate([[0, 1e-9, 1e-4, 1], np.random.default_rng(0).uniform(0, 1, 20)])
    value, slope = zip(*(exact.value_and_slope(rows, x) for x in lam), strict=True)
    # P loses up to two digits where its terms cancel; what each step rounds, the slopes of the
    # later ones multiply: 1e-16 * 100 * 1000 relative to the largest value.
    got = theory.g(lam, ns_coeffs, steps)
    np.testing.assert_allclose(got, np.array(value, float), rtol=1e-11, atol=1e-12)
    slope = np.array(slope, float)
    np.testing.assert_allclose(
        theory.g_prime(lam, ns_coeffs, steps), slope, rtol=1e-9, atol=1e-12 * abs(slope).max()
    )
    phi = theory.phi(np.sqrt(lam), ns_coeffs, steps)
    np.testing.assert_allclose(phi**2, got, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name, safety_factor", [("jordan", 1), ("you", 1), ("polar_express", 1.01)]
)
def test_phi_is_what_newton_schulz_does_to_normalized_singular_values(name, safety_factor):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 9))
    sigma = np.linalg.svd(x, compute_uv=False) / np.linalg.norm(x) / safety_factor
    after = np.linalg.svd(reference.newton_schulz(x, name, 5), compute_uv=False)
    np.testing.assert_allclose(np.sort(abs(theory.phi(sigma, name, 5))), np.sort(after), rtol=1e-10)


def test_one_step_is_the_default_and_scalars_stay_scalars():
    assert theory.phi(0.5, PAPER) == 2 * 0.5 - 1.5 * 0.5**3 + 0.5 * 0.5**5
    assert theory.g(0.25, PAPER) == theory.phi(0.5, PAPER) ** 2
    assert theory.g_prime(0.0, PAPER) == 4
    assert np.shape(theory.g_prime(np.zeros((2, 3)))) == (2, 3)


@pytest.mark.parametrize("name", STEPS)
def test_regions_of_each_step_end_at_the_roots_of_the_expanded_quartic(name):
    for row in STEPS[name]:
        found = theory.composed_regions(row, 1)
        # A grid of 2.5e-6, and a line between two of its points.
        np.testing.assert_allclose(interior_ends(found), exact.ends(row), rtol=0, atol=1e-9)
        middles = [sum(span) / 2 for span in found.amplification]
        assert min(abs(np.polyval(exact.quintic_slope(row), x)) for x in middles) > 1


def test_regions_that_can_be_found_by_hand():
    """g' = (1.5 - 0.5 x)(1.5 - 1.5 x) is 1 at 2 - sqrt(21) / 3 and never -1 below 1."""
    regions = theory.composed_regions((1.5, -0.5), 1)
    end = 2 - np.sqrt(21) / 3
    np.testing.assert_allclose(regions.amplification, [(0, end)], rtol=1e-10)
    np.testing.assert_allclose(regions.reduction, [(end, 1)], rtol=1e-10)
    # |g'| = 4 everywhere.
    assert theory.composed_regions((2.0, 0.0), 1) == theory.Regions(((0.0, 1.0),), ())


def test_regions_of_published_rows_to_the_digits_of_a_plot():
    """Typed in after reading them off np.roots once: a change of convention would show here."""
    expected = [(0, 0.2579), (0.3779, 0.8927)]
    found = theory.composed_regions("jordan", 1).amplification
    np.testing.assert_allclose(found, expected, atol=5e-5)
    np.testing.assert_allclose(theory.corollary_delta(PAPER), 0.3753, atol=5e-5)


@pytest.mark.parametrize("ns_coeffs, steps", COMPOSED)
def test_composed_end_points_are_certified_in_a_hundred_digits(ns_coeffs, steps):
    """|G'| - 1 has the region's sign a relative 1e-4 to either side of end points."""
    rows = coefficients.for_steps(ns_coeffs, steps).rows
    found = theory.composed_regions(ns_coeffs, steps)
    for spans, sign in ((found.amplification, 1), (found.reduction, -1)):
        for low, high in spans:
            if high - low > 1e-3 * high:  # others are thinner than a line of a plot
                for x in [low * (1 + 1e-4)] * (low > 0) + [high * (1 - 1e-4)] * (high < 1):
                    slope = exact.value_and_slope(rows, x)[1]
                    assert np.sign(float(abs(slope) - 1)) == sign, (low, high)


@pytest.mark.parametrize("ns_coeffs", ["jordan", "you", "polar_express", "dion", PAPER])
def test_no_crossing_of_two_steps_is_missed(ns_coeffs):
    """Sturm's theorem counts the real roots of G' = 1 and G' = -1, of degree 24."""
    rows = coefficients.for_steps(ns_coeffs, 2).rows
    slope = exact.derivative(exact.expanded(rows))
    count = sum(exact.count_roots([slope[0] - level, *slope[1:]], 0, 1) for level in (1, -1))
    assert len(interior_ends(theory.composed_regions(ns_coeffs, 2))) == count
