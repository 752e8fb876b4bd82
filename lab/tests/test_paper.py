"""The paper in numbers: the map of eigenvalues, variances, imbalance, and curvatures of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.paper import curvature, imbalance, regions, variance
from lab.tests.support import reference_theory as exact
from lab.tests.support.measures import SIDES, correlation, gaussian, ratio, squares
from lab.tests.support.measures import variance as variance_of_norms
from optax_muonplus import coefficients

PAPER = (2, -1.5, 0.5)
COMPOSED = [("jordan", 5), ("polar_express", 2), (PAPER, 12), ((1.5, -0.5), 6)]


# The map g of eigenvalues


@pytest.mark.parametrize("ns_coeffs, steps", COMPOSED)
def test_maps_slopes_and_regions_agree_with_a_hundred_digits(ns_coeffs, steps):
    rows = coefficients.for_steps(ns_coeffs, steps).rows
    lam = np.concatenate([[0, 1e-9, 1], np.random.default_rng(0).uniform(0, 1, 20)])
    value, slope = zip(*(exact.value_and_slope(rows, x) for x in lam), strict=True)
    # What each step rounds, the slopes of the later ones multiply.
    np.testing.assert_allclose(
        regions.g(lam, ns_coeffs, steps), np.array(value, float), rtol=1e-10, atol=1e-12
    )
    slope = np.array(slope, float)
    _, given = regions.value_and_slope(lam, ns_coeffs, steps)
    np.testing.assert_allclose(given, slope, rtol=1e-9, atol=1e-12 * abs(slope).max())
    found = regions.composed_regions(ns_coeffs, steps)
    for spans, sign in ((found.amplification, 1), (found.reduction, -1)):
        for low, high in spans:
            if high - low > 1e-3 * high:  # others are thinner than a line of a plot
                for x in [low * (1 + 1e-4)] * (low > 0) + [high * (1 - 1e-4)] * (high < 1):
                    slope = exact.value_and_slope(rows, x)[1]
                    assert np.sign(float(abs(slope) - 1)) == sign, (low, high)


def test_regions_of_published_rows_to_the_digits_of_a_plot():
    """Typed in after reading them off np.roots once: a change of convention would show here."""
    found = regions.composed_regions("jordan", 1).amplification
    np.testing.assert_allclose(found, [(0, 0.2579), (0.3779, 0.8927)], atol=5e-5)
    np.testing.assert_allclose(regions.corollary_delta(PAPER), 0.3753, atol=5e-5)
    assert regions.corollary_delta((1.8, 0.0)) == 1  # |g'| > 1 everywhere
    with pytest.raises(ValueError, match=r"phi'\(0\) > 1; those of .* give"):
        regions.corollary_delta((1.0, 0.5))


# The shift of variances


@pytest.mark.parametrize("size", [7, 14])
@pytest.mark.parametrize("ns_coeffs, steps", [("jordan", 1), ("you", 5), (PAPER, 4)])
def test_lemma_is_that_of_the_moments_of_the_sphere_and_of_a_simulation(ns_coeffs, steps, size):
    s = np.logspace(0, -1.5, 7)
    s /= np.linalg.norm(s)
    closed = variance.expected_variance_shift(np.stack([s, s]), ns_coeffs, steps, size=size)
    pairs = variance.pairwise_variance_shift(s, ns_coeffs, steps, size=size)
    after = exact.expected_variance(regions.g(s * s, ns_coeffs, steps), size)
    np.testing.assert_allclose(closed, after - exact.expected_variance(s * s, size), rtol=1e-9)
    np.testing.assert_allclose(closed, [pairs, pairs], rtol=1e-10)
    mean, error = variance.simulate_variance_shift(s, ns_coeffs, steps, size=size, samples=4000)
    assert abs(mean - pairs) < 3 * error < 0.5 * abs(pairs)


@pytest.mark.parametrize(
    "given, size, message",
    [
        ([0.5, 1.2], None, "from 0.5 to 1.2. Divide them"),
        ([np.nan], None, r"singular values in \[0, 1\]"),
        ([0.5] * 3, 2, "size=2 rows cannot have 3"),
    ],
)
def test_bad_spectra_are_named(given, size, message):
    with pytest.raises(ValueError, match=message):
        variance.expected_variance_shift(given, size=size)


# Curvatures


@pytest.mark.parametrize("side", ["row", "col"])
def test_curvatures_and_bound_of_a_quadratic_are_those_of_its_dense_hessian(side):
    half = np.random.default_rng(0).standard_normal((20, 20))
    hessian = half + half.T
    at = {"w": jnp.ones((4, 5))}

    def loss(matrices):
        x = matrices["w"].reshape(-1)
        return 0.5 * jnp.dot(x, jnp.asarray(hessian, jnp.float32) @ x)

    key = jax.random.key(0)
    found = jax.jit(lambda m: curvature.block_curvatures(loss, m, side, key=key, iterations=2000))(
        at
    )
    places = np.arange(20).reshape(4, 5)
    blocks = places if side == "row" else places.T
    norms = exact.block_norms(hessian, blocks)
    np.testing.assert_allclose(found["w"], norms, rtol=2e-4)
    gradient, update = np.random.default_rng(1).standard_normal((2, 4, 5))
    bound = curvature.descent_bound(found, {"w": gradient}, {"w": update}, side)["w"]
    slope = np.sum(gradient * update)
    total = sum(n * np.sum(update.ravel()[b] ** 2) for n, b in zip(norms, blocks, strict=True))
    expected = (slope, total, total / np.sum(update**2), slope / total, slope**2 / total / 2)
    np.testing.assert_allclose(bound, expected, rtol=5e-4)


def test_norm_of_an_indefinite_block_and_a_zero_update():
    """diag(3, -3, 1): no eigenvector is found, but the norm is."""
    found = curvature.block_curvatures(
        lambda m: 0.5 * jnp.sum(jnp.asarray([[3.0, -3.0, 1.0]]) * m["w"] ** 2),
        {"w": jnp.ones((1, 3))}, key=jax.random.key(2),
    )  # fmt: skip
    np.testing.assert_allclose(found["w"], [3], rtol=1e-6)
    zero = {"w": jnp.zeros((1, 3))}
    assert all(float(x) == 0 for x in curvature.descent_bound(found, zero, zero)["w"])


# Imbalance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("side", SIDES)
def test_measures_of_imbalance_are_those_of_numpy(dtype, side):
    x, y = gaussian(6, 9, dtype=dtype), gaussian(6, 9, seed=5, dtype=dtype)
    norms = squares(x, side)
    for found, expected in (
        (imbalance.norm_variance(x, side), variance_of_norms(x, side)),
        (imbalance.relative_variance(x, side), variance_of_norms(x, side) / norms.mean() ** 2),
        (imbalance.norm_ratio(x, side), ratio(x, side)),
        (imbalance.spearman(x, y, side), correlation(x, y, side)),
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_equal_norms_share_their_rank():
    """Small integers: the sums are exact, so that ties are ties."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 2, (2, 9, 4)).astype(np.float32)
        assert len(set(squares(x, "row"))) < 9
        given = imbalance.spearman(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_allclose(given, correlation(x, y, "row"), atol=1e-6)
    assert np.isnan(imbalance.spearman(jnp.ones((4, 6)), gaussian(4, 6)))


def test_stages_show_the_imbalance_that_muonplus_takes_away(capsys):
    imbalance.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    variance = {tuple(row[:3]): float(row[3]) for row in rows}
    for shape in ("128x128", "341x128", "128x341"):
        assert variance[shape, "polar factor", "row"] > 50 * variance[shape, "momentum", "row"]
        assert variance[shape, "after row_col", "col"] < 1e-12
