"""The map g and its slope against a hundred digits, and where steps amplify or reduce imbalance."""

from decimal import Decimal

import numpy as np
import pytest

from optax_muonplus import coefficients, theory
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
    rows = coefficients.resolve(ns_coeffs, steps).rows
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
    rows = STEPS[name]
    for row, regions in zip(rows, theory.step_regions(rows, len(rows)), strict=True):
        want = exact.ends(row)
        # Companion matrices: 1e-16 times a condition number of the roots below 1e4.
        np.testing.assert_allclose(interior_ends(regions), want, rtol=0, atol=1e-11)
        amplified = [abs(np.polyval(exact.quintic_slope(row), sum(s) / 2)) for s in
                     regions.amplification]  # fmt: skip
        assert min(amplified) > 1


def test_regions_that_can_be_found_by_hand():
    """g' = (1.5 - 0.5 x)(1.5 - 1.5 x) is 1 at 2 - sqrt(21) / 3 and never -1 below 1."""
    (regions,) = theory.step_regions((1.5, -0.5), 1)
    end = 2 - np.sqrt(21) / 3
    np.testing.assert_allclose(regions.amplification, [(0, end)], rtol=1e-15)
    np.testing.assert_allclose(regions.reduction, [(end, 1)], rtol=1e-15)


def test_regions_of_published_rows_to_the_digits_of_a_plot():
    """Typed in after reading them off np.roots once: a change of convention would show here."""
    (jordan,) = theory.step_regions("jordan", 1)
    expected = [(0, 0.2579), (0.3779, 0.8927)]
    np.testing.assert_allclose(jordan.amplification, expected, atol=5e-5)
    np.testing.assert_allclose(theory.corollary_delta(PAPER), 0.3753, atol=5e-5)
    assert len(theory.step_regions("you", 6)) == 6
    # Rows of the table have the safety factor in them; the printed ones do not.
    as_printed = reference_coefficients.POLAR_EXPRESS_AS_PRINTED
    printed = theory.step_regions(as_printed, 1)[0].amplification
    np.testing.assert_allclose(
        np.array(theory.step_regions("polar_express", 1)[0].amplification)[0, 1],
        printed[0][1],
        rtol=0.03,
    )
    assert printed != theory.step_regions("polar_express", 1)[0].amplification


@pytest.mark.parametrize("ns_coeffs, steps", COMPOSED)
def test_composed_end_points_are_certified_in_a_hundred_digits(ns_coeffs, steps):
    """|G'| - 1 has the region's sign a relative 1e-12 to either side of each end point."""
    rows = coefficients.resolve(ns_coeffs, steps).rows
    regions = theory.composed_regions(ns_coeffs, steps)
    near = Decimal("1e-12")
    for spans, sign in ((regions.amplification, 1), (regions.reduction, -1)):
        for low, high in spans:
            inside = [Decimal(low) * (1 + near)] * (low > 0)
            inside += [Decimal(high) * (1 - near)] * (high < 1)
            for x in inside:
                slope = exact.value_and_slope(rows, x)[1]
                assert np.sign(float(abs(slope) - 1)) == sign, (low, high)


@pytest.mark.parametrize("ns_coeffs", ["jordan", "you", "polar_express", "dion", PAPER])
def test_no_crossing_of_two_steps_is_missed(ns_coeffs):
    """Sturm's theorem counts the real roots of G' = 1 and G' = -1, of degree 24."""
    rows = coefficients.resolve(ns_coeffs, 2).rows
    slope = exact.derivative(exact.expanded(rows))
    count = sum(exact.count_roots([slope[0] - level, *slope[1:]], 0, 1) for level in (1, -1))
    assert len(interior_ends(theory.composed_regions(ns_coeffs, 2))) == count


@pytest.mark.parametrize("ns_coeffs, steps", [*COMPOSED, ("jordan", 8), ("you", 6)])
def test_no_crossing_of_many_steps_is_missed_on_a_fine_grid(ns_coeffs, steps):
    regions = theory.composed_regions(ns_coeffs, steps)
    grid = np.unique(np.concatenate([np.linspace(0, 1, 200_001), np.logspace(-9, 0, 100_001)]))
    ends = interior_ends(regions)
    first = abs(theory.g_prime(ends[:1] / 2, ns_coeffs, steps)) > 1
    amplified = (np.searchsorted(ends, grid) % 2 == 0) == first
    clear = abs(abs(theory.g_prime(grid, ns_coeffs, steps)) - 1) > 1e-6
    got = abs(theory.g_prime(grid, ns_coeffs, steps)) > 1
    np.testing.assert_array_equal(amplified[clear], got[clear])


def test_composition_of_one_step_is_that_step():
    assert theory.composed_regions("jordan", 1) == theory.step_regions("jordan", 1)[0]
    assert theory.step_regions("jordan", 3) == theory.step_regions("jordan", 1) * 3


def test_end_points_where_intervals_are_halved_and_where_the_slope_touches_one():
    # g' = (3.25 - 2.5 x)(3.25 - 7.5 x) is -1 at exactly 1/2, and turns beyond it.
    (halved,) = theory.step_regions((3.25, -2.5), 1)
    assert halved.reduction[0][1] == 0.5 and halved.amplification[1] == (0.5, 1.0)
    # The least value of g' = (a + b x)(a + 3 b x) is -a^2/3, here -1 but for rounding, at 1/2. What
    # rounding leaves beyond 1 is a sliver of the order of its root.
    (touching,) = theory.step_regions((np.sqrt(3), -4 / np.sqrt(3)), 1)
    assert sum(high - low for low, high in touching.amplification if 0.3 < low < 0.7) < 1e-7
    # Here g' is 1 and g'' is 0 at 1/2, exactly: P = 2, P' = -1.5, P'' = 4.875.
    ends = interior_ends(theory.step_regions((3.359375, -3.9375, 2.4375), 1)[0])
    assert theory.g_prime(0.5, (3.359375, -3.9375, 2.4375)) == 1 and 0.5 not in ends
    identity = theory.composed_regions((1.0, 0.0), 3)
    assert identity == theory.Regions((), ())
    # |g'| = 4 everywhere.
    assert theory.composed_regions((2.0, 0.0), 1) == theory.Regions(((0.0, 1.0),), ())


def test_upper_extends_the_regions_of_steps_that_see_more_than_one():
    (near,) = theory.step_regions("jordan", 1)
    (far,) = theory.step_regions("jordan", 1, upper=1.45)
    assert far.amplification[:2] == near.amplification
    np.testing.assert_allclose(
        far.reduction[1], exact.ends(reference_coefficients.JORDAN[0], 1.45)[2:4], rtol=1e-12
    )
    with pytest.raises(ValueError, match=r"0 and 3.0 reach .* after step 2 .* smaller upper"):
        theory.composed_regions("jordan", 5, upper=3.0)
