"""The theory against a hundred digits, moments of the sphere, and dense Hessians."""

import functools
import inspect
import itertools
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import reference
from tests.support import reference_theory as exact

import optax_muonplus as omp
from optax_muonplus import coefficients, polar, theory

PAPER = (2, -1.5, 0.5)
STEPS = {
    "jordan": reference.JORDAN,
    "paper's example": [PAPER],
    "you": reference.YOU,
    "polar express": reference.POLAR_EXPRESS_AS_PRINTED,
    "dion": reference.DION,
}
# A name or row as the package takes it, and how many steps.
COMPOSED = [
    (name, t) for name in ("jordan", "you", "dion", "polar_express", "cans") for t in (2, 5)
]
COMPOSED += [(PAPER, 5), (PAPER, 12), ((1.5, -0.5), 6), ((2.1875, -2.1875, 1.3125, -0.3125), 4)]


def interior_ends(regions):
    """End points inside, after a check that the regions alternate and fill [0, 1]."""
    tagged = [(span, "+") for span in regions.amplification]
    tagged += [(span, "-") for span in regions.reduction]
    tagged.sort()
    spans = [span for span, _ in tagged]
    assert spans[0][0] == 0 and spans[-1][1] == 1
    for (left, a), (right, b) in itertools.pairwise(tagged):
        assert left[1] == right[0] and a != b
    return np.array([span[1] for span in spans[:-1]])


# --- maps ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name, headroom", [("jordan", 1), ("you", 1), ("polar_express", 1.01)])
def test_phi_is_what_newton_schulz_does_to_normalized_singular_values(name, headroom):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 9))
    sigma = np.linalg.svd(x, compute_uv=False) / np.linalg.norm(x) / headroom
    after = np.linalg.svd(reference.newton_schulz(x, name, 5), compute_uv=False)
    np.testing.assert_allclose(np.sort(abs(theory.phi(sigma, name, 5))), np.sort(after), rtol=1e-10)


def test_one_step_is_the_default_and_scalars_stay_scalars():
    assert theory.phi(0.5, PAPER) == 2 * 0.5 - 1.5 * 0.5**3 + 0.5 * 0.5**5
    assert theory.g(0.25, PAPER) == theory.phi(0.5, PAPER) ** 2
    assert theory.g_prime(0.0, PAPER) == 4
    assert np.shape(theory.g_prime(np.zeros((2, 3)))) == (2, 3)


# --- regions -------------------------------------------------------------------------------------


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
    printed = theory.step_regions(reference.POLAR_EXPRESS_AS_PRINTED, 1)[0].amplification
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
        far.reduction[1], exact.ends(reference.JORDAN[0], 1.45)[2:4], rtol=1e-12
    )
    with pytest.raises(ValueError, match=r"0 and 3.0 reach .* after step 2 .* smaller upper"):
        theory.composed_regions("jordan", 5, upper=3.0)


# --- corollary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ns_coeffs, steps", [("jordan", 1), ("you", 1), (PAPER, 1), (PAPER, 3)])
def test_delta_is_where_the_shift_stops_being_positive(ns_coeffs, steps):
    delta = theory.corollary_delta(ns_coeffs, steps)
    rng = np.random.default_rng(0)
    lam = delta * rng.uniform(0, 1, (200, 5)) ** rng.uniform(0.1, 4, (200, 1))
    lam[:, 0] = delta
    assert theory.expected_variance_shift(np.sqrt(lam), ns_coeffs, steps).min() > 0
    beyond = np.sqrt([delta * (1 + 1e-6), delta * (1 + 2e-6)])
    assert theory.pairwise_variance_shift(beyond, ns_coeffs, steps) < 0


def test_delta_ends_at_one_and_needs_a_slope_above_one():
    assert theory.corollary_delta((2.0, 1.0)) == 1
    for row in [(1.0, 0.5), (0.5, 3.0), (-2.0, 1.0)]:
        with pytest.raises(ValueError, match=r"phi'\(0\) > 1; those of .* give"):
            theory.corollary_delta(row)


# --- lemma ---------------------------------------------------------------------------------------


def spectra(n):
    rng = np.random.default_rng(n)
    raw = [rng.uniform(0, 1, n), np.logspace(0, -3, n), rng.uniform(0, 1, n) ** 5]
    return [s / np.linalg.norm(s) for s in raw] + [rng.uniform(0, 1, n)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("n", [2, 7, 150])
@pytest.mark.parametrize("ns_coeffs, steps", [("jordan", 1), ("you", 5), (PAPER, 1), (PAPER, 4)])
def test_lemma_in_closed_form_pairwise_and_from_the_moments_of_the_sphere(
    ns_coeffs, steps, n, size
):
    for s in spectra(n):
        lam, rows = s * s, size * n
        closed = theory.expected_variance_shift(s, ns_coeffs, steps, size=rows)
        pairs = theory.pairwise_variance_shift(s, ns_coeffs, steps, size=rows)
        after = exact.expected_variance(theory.g(lam, ns_coeffs, steps), rows)
        before = exact.expected_variance(lam, rows)
        # Where a shift is the small difference of two variances, it is known to their rounding.
        slack = 1e-14 * (after + before)
        np.testing.assert_allclose(closed, pairs, rtol=1e-10, atol=slack)
        # The moments cancel besides, by the mean against the spread.
        total = (theory.g(lam, ns_coeffs, steps).sum() ** 2 + lam.sum() ** 2) / rows**2
        np.testing.assert_allclose(closed, after - before, rtol=1e-10, atol=1e-13 * total)


@pytest.mark.parametrize("n", [5, 9])
def test_lemma_agrees_with_a_hundred_digits_also_for_clustered_spectra(n):
    rows = coefficients.resolve("jordan", 2).rows
    spread = np.random.default_rng(1).uniform(0.1, 0.9, 5)
    clustered = 0.4 + 1e-9 * np.arange(5)
    for s, closed_to in ((spread, 1e-12), (clustered, 1e-5)):
        want = exact.exact_shift(s * s, rows, n)
        pairs = theory.pairwise_variance_shift(s, "jordan", 2, size=n)
        np.testing.assert_allclose(pairs, want, rtol=1e-12)
        # Differences of 1e-9 between values of g that are rounded at 1e-16.
        closed = theory.expected_variance_shift(s, "jordan", 2, size=n)
        np.testing.assert_allclose(closed, want, rtol=closed_to)


def test_lemma_takes_batches_and_vanishes_for_equal_singular_values():
    s = np.stack(spectra(6)).reshape(2, 2, 6)
    for shift in (theory.expected_variance_shift, theory.pairwise_variance_shift):
        assert shift(s, "you", 3).shape == (2, 2)
        np.testing.assert_allclose(shift(s, "you", 3)[1, 0], shift(s[1, 0], "you", 3), rtol=1e-14)
        np.testing.assert_allclose(shift(np.full(4, 0.5)), 0, atol=1e-16)
        assert shift([0.7]) == 0
        # A float32 spectrum may be beyond 1 by its rounding.
        assert np.isfinite(shift(np.array([1 + 1e-7, 0.5], np.float32)))


def test_mean_value_slope_is_the_divided_difference_and_becomes_the_derivative():
    rng = np.random.default_rng(2)
    x, y = rng.uniform(0, 1, (2, 30))
    slope = theory.mean_value_slope(x, y, "you", 3)
    difference = theory.g(x, "you", 3) - theory.g(y, "you", 3)
    np.testing.assert_allclose(slope, difference / (x - y), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        theory.mean_value_slope(x, x, "you", 3), theory.g_prime(x, "you", 3), rtol=1e-9, atol=1e-9
    )
    assert theory.mean_value_slope(x[:, None], y[None], "jordan").shape == (30, 30)


@pytest.mark.parametrize("size", [12, 20])
@pytest.mark.parametrize("ns_coeffs, steps", [("jordan", 1), ("you", 5), (PAPER, 2)])
def test_simulation_agrees_with_the_lemma_within_three_standard_errors(ns_coeffs, steps, size):
    """Seeds are fixed: of 6 correct cases one in sixty would be beyond, and none of these is."""
    s = np.logspace(0, -1.5, 12)
    s /= np.linalg.norm(s)
    mean, error = theory.simulate_variance_shift(s, ns_coeffs, steps, size=size, samples=4000)
    want = theory.expected_variance_shift(s, ns_coeffs, steps, size=size)
    assert abs(mean - want) < 3 * error
    # The test has teeth: three standard errors are a fifth of the shift at most.
    assert 3 * error < 0.2 * abs(want)


def test_standard_error_is_that_of_the_mean():
    """The spread of many means is their standard error: 100 of them tell it to 7%."""
    s = np.array([0.8, 0.5, 0.3, 0.1])
    rng = np.random.default_rng(0)
    runs = [theory.simulate_variance_shift(s, samples=100, seed=rng) for _ in range(100)]
    errors = np.mean([run.standard_error for run in runs])
    np.testing.assert_allclose(np.std([run.mean for run in runs]), errors, rtol=0.25)
    assert theory.simulate_variance_shift(s, seed=1) == theory.simulate_variance_shift(s, seed=1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: theory.expected_variance_shift([]), r"at least one; got shape \(0,\)"),
        (lambda: theory.pairwise_variance_shift(0.5), r"at least one; got shape \(\)"),
        (lambda: theory.expected_variance_shift([0.5, 1.2]), "from 0.5 to 1.2. Divide them"),
        (lambda: theory.simulate_variance_shift([-0.1, 0.3]), "from -0.1 to 0.3"),
        (lambda: theory.expected_variance_shift([np.nan]), r"singular values in \[0, 1\]"),
        (lambda: theory.expected_variance_shift([0.5] * 3, size=2), "size=2 rows cannot have 3"),
        (lambda: theory.expected_variance_shift([0.5], size=1.5), "size must be an integer"),
        (lambda: theory.simulate_variance_shift([[0.5]]), r"one spectrum \(r,\), got shape \(1, 1"),
        (lambda: theory.simulate_variance_shift([0.5], samples=1), "samples must be at least 2"),
        (lambda: theory.phi(0.5, "jorden"), "Unknown ns_coeffs 'jorden'. Known names: jordan"),
        (lambda: theory.step_regions("you", 7), "too few for ns_steps=7"),
        (lambda: theory.composed_regions("you", 0), "ns_steps must be an integer of at least 1"),
        (lambda: theory.composed_regions(upper=0), "upper must be positive and finite, got 0"),
        (lambda: theory.step_regions(upper=np.nan), "upper must be positive and finite, got nan"),
        (lambda: jax.jit(lambda n: theory.g(0.5, "jordan", n))(2), "is traced, but .* NumPy"),
    ],
)
def test_bad_input_of_the_scalar_theory_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- curvature -----------------------------------------------------------------------------------


def symmetric(n, seed=0):
    """Indefinite, with as much between blocks as within, and gaps that power iteration likes."""
    a = np.random.default_rng(seed).standard_normal((n, n))
    return a + a.T


def quadratic(hessian, path):
    """The loss 1/2 x^T H x + sum(x) of one leaf, flattened in its own order, and 0 of others."""
    h = jnp.asarray(hessian, jnp.float32)

    def loss(params):
        x = functools.reduce(lambda tree, name: tree[name], path.split("/"), params).reshape(-1)
        return 0.5 * jnp.dot(x, h @ x) + jnp.sum(x)

    return loss


def places(shape):
    return np.arange(np.prod(shape)).reshape(shape)


def row_and_column_places():
    """For each layout: path, shape, dimension numbers, and for each matrix its (rows, columns)."""
    kernel, weight = places((5, 4)), places((4, 5))
    heads, stacked, fused = places((5, 2, 3)), places((2, 3, 4)), places((4, 7))
    by_input = places((7, 4))
    return {
        "in, out": ("dense/kernel", None, kernel, [(kernel.T, kernel)]),
        "out, in": ("dense/weight", None, weight, [(weight, weight.T)]),
        "heads": (
            "query/kernel",
            None,
            heads,
            [(heads.reshape(5, 6).T, heads.reshape(5, 6))],
        ),
        "heads back": (
            "out/kernel",
            None,
            places((2, 3, 5)),
            [(places((6, 5)).T, places((6, 5)))],
        ),
        "layers": (
            "layers/kernel",
            omp.MuonDimensionNumbers(1, 2),
            stacked,
            [(stacked[0].T, stacked[0]), (stacked[1].T, stacked[1])],
        ),
        "layers last, out first": (
            "layers/kernel",
            omp.MuonDimensionNumbers(1, 0),
            places((3, 4, 2)),
            [(places((3, 4, 2))[..., i], places((3, 4, 2))[..., i].T) for i in range(2)],
        ),
        "fused outputs": (
            "qkv/kernel",
            omp.MatrixSpec(0, 1, split_sizes=(3, 4)),
            fused,
            [(fused[:, :3].T, fused[:, :3]), (fused[:, 3:].T, fused[:, 3:])],
        ),
        "fused inputs": (
            "down/kernel",
            omp.MatrixSpec(0, 1, split_sizes=(3, 4), split_axis=0),
            by_input,
            [(by_input[:3].T, by_input[:3]), (by_input[3:].T, by_input[3:])],
        ),
    }


def in_tree(path, leaf):
    outer, inner = path.split("/")
    return {outer: {inner: leaf, "bias": jnp.ones(3)}, "norm": {"scale": jnp.ones(2)}}


def numbers(path, spec):
    return functools.partial(omp.muon_dimension_numbers, rules=[(path, spec)])


def compiled(loss, params, *arguments, **options):
    """block_curvatures as one program, which compiles faster than its parts."""
    return jax.jit(lambda p: theory.block_curvatures(loss, p, *arguments, **options))(params)


def flat(arrays):
    """Batch and fused blocks as one list of matrices, in the order of weighted_curvature."""
    return [row for array in arrays for row in np.asarray(array)]


@pytest.mark.parametrize("side", ["row", "col"])
@pytest.mark.parametrize("layout", row_and_column_places())
def test_curvature_of_quadratics_in_every_layout(layout, side):
    """Blocks are cut from the known Hessian by output unit or input feature, never by axis."""
    path, spec, order, matrices = row_and_column_places()[layout]
    hessian = symmetric(order.size)
    rng = np.random.default_rng(1)
    params = in_tree(path, jnp.asarray(rng.standard_normal(order.shape), jnp.float32))
    update = rng.standard_normal(order.shape)
    arguments = (side, numbers(path, spec)) if spec else (side,)
    curvatures = compiled(
        quadratic(hessian, path), params, *arguments, key=jax.random.key(0), iterations=2000
    )
    assert list(curvatures) == [path]
    norms = flat(curvatures[path].norms)
    weighted = theory.weighted_curvature(curvatures, in_tree(path, update))[path]
    for got, curvature, pair in zip(norms, weighted, matrices, strict=True):
        blocks = pair[side == "col"]
        want = exact.block_norms(hessian, blocks)
        # What is left is (ratio of eigenvalues)^4000, nothing for gaps above 0.5%, and float32.
        np.testing.assert_allclose(got, want, rtol=2e-4)
        sums = sum(w * np.sum(update.ravel()[b] ** 2) for w, b in zip(want, blocks, strict=True))
        np.testing.assert_allclose(curvature, sums, rtol=2e-4)


def mlp_loss(params, x, y):
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])
    out = hidden @ params["down"]["weight"].T
    return jnp.mean(jnp.square(out - y))


def mlp():
    rng = np.random.default_rng(3)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {
        "up": {"kernel": jnp.asarray(normal((4, 6))), "bias": jnp.asarray(normal(6))},
        "down": {"weight": jnp.asarray(normal((3, 6)))},
    }
    return params, jnp.asarray(normal((20, 4))), jnp.asarray(normal((20, 3)))


@pytest.mark.parametrize("side", ["row", "col"])
def test_curvature_of_a_network_against_its_dense_hessian(side):
    params, x, y = mlp()
    curvatures = jax.jit(
        lambda params, x, y: theory.block_curvatures(
            lambda p: mlp_loss(p, x, y), params, side, key=jax.random.key(1), iterations=100
        )
    )(params, x, y)
    for outer, inner in (("up", "kernel"), ("down", "weight")):
        leaf = params[outer][inner]

        def of_leaf(leaf, outer=outer, inner=inner):
            return mlp_loss(params | {outer: params[outer] | {inner: leaf}}, x, y)

        dense = np.asarray(jax.hessian(of_leaf)(leaf), np.float64).reshape(leaf.size, leaf.size)
        order = places(leaf.shape)
        rows_first = inner == "weight"
        blocks = order if rows_first == (side == "row") else order.T
        curvature = curvatures[f"{outer}/{inner}"]
        # float32 rounding of the products, some 1e-6, and what the residual owns up to.
        np.testing.assert_allclose(
            curvature.norms[0][0], exact.block_norms(dense, blocks), rtol=1e-4
        )
        assert curvature.residuals[0].max() < 1e-2
        np.testing.assert_array_equal(curvature.index[0][0], np.arange(len(blocks)))


def test_hessian_between_blocks_does_not_enter():
    """H with nothing but what is between rows: every block is zero, and nothing is not a number."""
    order = places((3, 4))
    hessian = symmetric(12)
    for block in order.T:
        hessian[np.ix_(block, block)] = 0
    curvatures = compiled(
        quadratic(hessian, "a/kernel"), {"a": {"kernel": jnp.ones((3, 4))}}, key=jax.random.key(0)
    )
    np.testing.assert_array_equal(curvatures["a/kernel"].norms[0], np.zeros((1, 4)))
    np.testing.assert_array_equal(curvatures["a/kernel"].residuals[0], np.zeros((1, 4)))


def test_norm_of_an_indefinite_block_with_eigenvalues_of_one_size():
    """diag(3, -3, 1): no eigenvector is found, the norm is, and the residual says so."""
    hessian = np.diag([3.0, -3.0, 1.0])
    curvatures = compiled(
        quadratic(hessian, "a/kernel"), {"a": {"kernel": jnp.ones((3, 1))}}, key=jax.random.key(2)
    )
    np.testing.assert_allclose(curvatures["a/kernel"].norms[0], [[3]], rtol=1e-6)
    assert curvatures["a/kernel"].residuals[0].max() < 1e-5


def test_more_iterations_raise_the_norm_and_lower_the_residual():
    order = places((20, 3))
    loss = quadratic(symmetric(60), "a/kernel")
    params = {"a": {"kernel": jnp.ones(order.shape)}}
    runs = [
        compiled(loss, params, key=jax.random.key(0), iterations=n)["a/kernel"]
        for n in (1, 5, 25, 125)
    ]
    norms = np.array([run.norms[0][0] for run in runs])
    residuals = np.array([run.residuals[0][0] for run in runs])
    want = exact.block_norms(symmetric(60), order.T)
    assert np.all(np.diff(norms, axis=0) > -1e-6 * want)
    assert np.all(norms <= want * (1 + 1e-5))
    assert np.all(residuals[-1] < residuals[0] / 10)
    # What the residual promises: an eigenvalue of H^2 within it, relatively, of s^2.
    for j, block in enumerate(order.T):
        squares = np.linalg.eigvalsh(symmetric(60)[np.ix_(block, block)]) ** 2
        for s, residual in zip(norms[:, j], residuals[:, j], strict=True):
            assert np.min(abs(squares - s * s)) <= residual * s * s * (1 + 1e-3) + 1e-4 * s * s


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_curvature_scales_with_the_loss(scale):
    params, x, y = mlp()
    both = [
        compiled(lambda p, c=c: c * mlp_loss(p, x, y), params, key=jax.random.key(1), only="up")[
            "up/kernel"
        ].norms[0]
        for c in (1.0, scale)
    ]
    np.testing.assert_allclose(both[1] / scale, both[0], rtol=1e-4)


def test_blocks_at_once_changes_nothing_and_a_choice_of_blocks_is_a_part_of_all():
    params, x, y = mlp()
    run = functools.partial(compiled, lambda p: mlp_loss(p, x, y), params, key=jax.random.key(4))
    one, many = run(blocks_at_once=1), run(blocks_at_once=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, many)
    some = run(blocks=3, iterations=100)["up/kernel"]
    index = np.asarray(some.index[0][0])
    assert index.shape == (3,) and np.all(np.diff(index) > 0) and index[-1] < 6
    everything = run(blocks=100, iterations=100)["up/kernel"].norms[0][0]
    np.testing.assert_allclose(some.norms[0][0], everything[index], rtol=1e-3)
    other = compiled(lambda p: mlp_loss(p, x, y), params, key=jax.random.key(5), blocks=3)
    assert any(
        not np.array_equal(other[path].index[0], run(blocks=3)[path].index[0]) for path in other
    )


def test_choices_stand_for_all_blocks_and_differ_between_matrices():
    norms = np.arange(1.0, 7.0)
    update = np.random.default_rng(0).standard_normal((1, 5, 6))
    view = compiled(
        lambda p: 0.5 * jnp.sum(jnp.asarray(norms, jnp.float32) * jnp.sum(p["w"] ** 2, (0, 1))),
        {"w": jnp.ones((1, 5, 6))},
        weight_dimension_numbers={"w": omp.MuonDimensionNumbers(1, 2)},
        key=jax.random.key(0),
        blocks=2,
        iterations=2,
    )["w"]
    estimate = theory.weighted_curvature({"w": view}, {"w": update})["w"][0]
    index = np.asarray(view.index[0][0])
    terms = norms * np.sum(update[0] ** 2, 0)
    np.testing.assert_allclose(estimate, terms[index].sum() * 3, rtol=1e-5)
    stacked = compiled(
        lambda p: jnp.sum(jnp.square(p["w"])),
        {"w": jnp.ones((8, 3, 30))},
        weight_dimension_numbers={"w": omp.MuonDimensionNumbers(1, 2)},
        key=jax.random.key(0),
        blocks=4,
        iterations=1,
    )["w"].index[0]
    assert stacked.shape == (8, 4) and len(np.unique(stacked, axis=0)) == 8


def test_no_hessian_is_formed():
    """The Hessian of a 64 x 64 kernel would be 64 MiB; all rows' norms take a few."""
    x = jnp.ones((16, 64))

    def norms(kernel):
        return theory.block_curvatures(
            lambda p: jnp.mean(jnp.tanh(x @ p["kernel"]) ** 2),
            {"kernel": kernel},
            key=jax.random.key(0),
        )["kernel"].norms

    compiled = jax.jit(norms).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21


def test_narrow_parameters_have_norms_in_float32():
    hessian = np.diag(np.arange(1.0, 7.0))
    params = {"a": {"kernel": jnp.ones((3, 2), jnp.bfloat16)}}
    loss = quadratic(hessian, "a/kernel")
    found = compiled(loss, params, key=jax.random.key(0))["a/kernel"].norms[0]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [[5, 6]], rtol=0.02)


# --- descent -------------------------------------------------------------------------------------


def test_bound_is_exact_where_blocks_are_multiples_of_the_identity():
    """L = sum_j h_j |w_j|^2 / 2 over rows: the theorem holds with equality."""
    rng = np.random.default_rng(5)
    h = jnp.asarray(rng.uniform(0.5, 4, (1, 6)), jnp.float32)
    kernel, update = (jnp.asarray(rng.standard_normal((4, 6)), jnp.float32) for _ in range(2))

    def loss(params):
        return 0.5 * jnp.sum(h * jnp.square(params["kernel"]))

    params, gradients = {"kernel": kernel}, {"kernel": h * kernel}
    curvatures = compiled(loss, params, key=jax.random.key(0))
    bound = theory.descent_bound(curvatures, gradients, {"kernel": update})["kernel"]
    total = jnp.sum(h * jnp.square(update))
    slope = jnp.sum(h * kernel * update)
    np.testing.assert_allclose(bound.curvature, [total], rtol=1e-5)
    np.testing.assert_allclose(bound.slope, [slope], rtol=1e-5)
    np.testing.assert_allclose(bound.mean_curvature, [total / jnp.sum(update**2)], rtol=1e-5)
    for eta in (0.1, float(bound.step_size[0])):
        change = loss({"kernel": kernel - eta * update}) - loss(params)
        np.testing.assert_allclose(
            change, -eta * bound.slope[0] + eta**2 / 2 * bound.curvature[0], rtol=1e-3, atol=1e-5
        )
    lowest = loss(params) - loss({"kernel": kernel - bound.step_size[0] * update})
    np.testing.assert_allclose(bound.decrease, [lowest], rtol=1e-3)


def test_slope_of_the_polar_factor_is_the_nuclear_norm_and_flat_updates_meet_less_curvature():
    """Gradient and curvature both large in the same rows, as the paper finds: Muon+ meets less."""
    rng = np.random.default_rng(6)
    scale = np.linspace(1, 4, 8)[None]
    params = {"kernel": jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)}
    h = jnp.asarray(scale**2, jnp.float32)

    def loss(params):
        return 0.5 * jnp.sum(h * jnp.square(params["kernel"]))

    gradients = jax.grad(loss)(params)
    curvatures = compiled(loss, params, key=jax.random.key(0))
    bounds = []
    for norm in ("none", "row"):
        tx = omp.scale_by_muonplus(norm=norm, polar=polar.svd, shape_scale="none")
        updates, _ = tx.update(gradients, tx.init(params), params)
        bounds.append(theory.descent_bound(curvatures, gradients, updates)["kernel"])
    nuclear = np.linalg.svd(gradients["kernel"], compute_uv=False).sum()
    np.testing.assert_allclose(bounds[0].slope, [nuclear], rtol=1e-5)
    # Rows of equal norms weigh all curvatures alike.
    np.testing.assert_allclose(bounds[1].mean_curvature, [np.mean(scale**2)], rtol=1e-4)
    assert bounds[1].mean_curvature < bounds[0].mean_curvature


def test_a_zero_update_gains_nothing_and_scale_cancels():
    params, x, y = mlp()
    gradients = jax.grad(mlp_loss)(params, x, y)
    curvatures = compiled(lambda p: mlp_loss(p, x, y), params, key=jax.random.key(0), only="down")
    zero, one, ten = (
        theory.descent_bound(curvatures, gradients, jax.tree.map(lambda g, c=c: c * g, gradients))
        for c in (0, 1, 10)
    )
    assert all(float(value[0]) == 0 for value in zero["down/weight"])
    for name, power in zip(theory.DescentBound._fields, (1, 2, 0, -1, 0), strict=True):
        small, large = getattr(one["down/weight"], name), getattr(ten["down/weight"], name)
        np.testing.assert_allclose(large, small * 10.0**power, rtol=1e-4)


# --- bad input of the curvature ------------------------------------------------------------------


VECTORS = {"norm": {"scale": jnp.ones(3)}, "dense": {"kernel": jnp.ones((2, 3))}}


def total(params):
    return sum(jnp.sum(jnp.square(jnp.abs(x))) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "loss, params, arguments, message",
    [
        (total, VECTORS, {"side": "rows"}, "Unknown side 'rows'. Known: row, col"),
        (total, VECTORS, {"iterations": 0}, "iterations must be an integer of at least 1, got 0"),
        (total, VECTORS, {"blocks": 0}, "blocks must be an integer of at least 1"),
        (total, VECTORS, {"blocks_at_once": 2.5}, "blocks_at_once must be an integer"),
        (
            total,
            VECTORS,
            {"only": "attn"},
            "only='attn' matches no matrix. The nearest .* dense/kernel",
        ),
        (
            total,
            VECTORS,
            {"only": ["dense", "scale"]},
            "only='scale' matches norm/scale, which are not matrices",
        ),
        (total, VECTORS, {"only": []}, "chooses no matrix"),
        (total, {"scale": jnp.ones(3)}, {}, r"no matrix, .* among scale \(3,\)"),
        (total, {}, {}, "No matrix is among the parameters: there are none"),
        (total, {"conv": jnp.ones((2, 3, 4))}, {}, "No rule says how .* conv"),
        (
            total,
            VECTORS,
            {"weight_dimension_numbers": {"norm": omp.MuonDimensionNumbers(0, 1), "dense": None}},
            r"shape \(3,\) is not a matrix",
        ),
        (total, {"w": jnp.ones((2, 2), jnp.complex64)}, {}, r"real floating-point .* w \(complex"),
        (total, {"w": jnp.ones((2, 2), jnp.int32)}, {}, r"real floating-point .* w \(int32"),
        (lambda p: p["dense"]["kernel"], VECTORS, {}, "must be one real number, got Shape"),
        (lambda p: (total(p), 1.0), VECTORS, {}, "return nothing beside the loss"),
    ],
)
def test_bad_input_of_the_curvature_is_named(loss, params, arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.block_curvatures(loss, params, key=jax.random.key(0), **arguments)


def test_updates_must_be_there_and_have_the_shapes_of_their_parameters():
    curvatures = theory.block_curvatures(total, VECTORS, key=jax.random.key(0))
    with pytest.raises(ValueError, match="No updates for dense/kernel: there are norm/scale"):
        theory.weighted_curvature(curvatures, {"norm": {"scale": jnp.ones(3)}})
    turned = {"dense": {"kernel": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match=r"dense/kernel has \(3, 2\), its parameter \(2, 3\)"):
        theory.weighted_curvature(curvatures, turned)
    with pytest.raises(ValueError, match="Shapes of gradients"):
        theory.descent_bound(curvatures, turned, VECTORS)


# --- names ---------------------------------------------------------------------------------------


def test_every_public_name_is_documented_and_listed():
    public = {name for name in vars(theory) if not name.startswith("_")}
    for name in public:
        assert inspect.getdoc(getattr(theory, name)), name
    functions = {name for name in public if inspect.isfunction(getattr(theory, name))}
    for name in functions:
        assert f"`{name}`" in theory.__doc__, name
