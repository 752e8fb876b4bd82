"""Curvatures of blocks against dense Hessians, and the descent bound where it is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from examples.experiments.theory import curvature as theory
from tests.support import reference_theory as exact

SHAPE = (4, 5)
PLACES = np.arange(20).reshape(SHAPE)


def symmetric(n, seed=0):
    """Indefinite, with as much between blocks as within, and gaps that power iteration likes."""
    a = np.random.default_rng(seed).standard_normal((n, n))
    return a + a.T


def quadratic(hessian):
    """The loss 1/2 x^T H x + sum(x) of one matrix."""
    h = jnp.asarray(hessian, jnp.float32)

    def loss(matrices):
        x = matrices["w"].reshape(-1)
        return 0.5 * jnp.dot(x, h @ x) + jnp.sum(x)

    return loss


def of_quadratic(hessian, shape, side="row", **options):
    """Curvatures of a quadratic loss, whose Hessian is the same everywhere."""
    matrices = {"w": jnp.ones(shape)}
    options = {"key": jax.random.key(0)} | options
    return jax.jit(lambda m: theory.block_curvatures(quadratic(hessian), m, side, **options))(
        matrices
    )["w"]


def mlp_loss(matrices):
    rng = np.random.default_rng(3)
    x, y = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((20, 4), (20, 3)))
    return jnp.mean(jnp.square(jnp.tanh(x @ matrices["up"].T) @ matrices["down"].T - y))


def mlp():
    rng = np.random.default_rng(4)
    shapes = {"up": (6, 4), "down": (3, 6)}
    return {k: jnp.asarray(rng.standard_normal(shape), jnp.float32) for k, shape in shapes.items()}


@pytest.mark.parametrize("side", ["row", "col"])
def test_curvature_of_a_quadratic(side):
    hessian = symmetric(20)
    found = of_quadratic(hessian, SHAPE, side, iterations=2000)
    blocks = PLACES if side == "row" else PLACES.T
    want = exact.block_norms(hessian, blocks)
    # What is left is (ratio of eigenvalues)^4000, nothing for gaps above 0.5%, and float32.
    np.testing.assert_allclose(found, want, rtol=2e-4)
    update = np.random.default_rng(1).standard_normal(SHAPE)
    sums = sum(w * np.sum(update.ravel()[b] ** 2) for w, b in zip(want, blocks, strict=True))
    update = {"w": jnp.asarray(update, jnp.float32)}
    bound = theory.descent_bound({"w": found}, update, update, side)["w"]
    np.testing.assert_allclose(bound.curvature, sums, rtol=2e-4)


@pytest.mark.parametrize("side", ["row", "col"])
def test_curvature_of_a_network_against_its_dense_hessian(side):
    matrices = mlp()
    found = jax.jit(
        lambda m: theory.block_curvatures(mlp_loss, m, side, key=jax.random.key(1), iterations=100)
    )(matrices)
    for name, matrix in matrices.items():
        hessian = jax.hessian(lambda x, name=name: mlp_loss(matrices | {name: x}))(matrix)
        dense = np.asarray(hessian, np.float64).reshape(matrix.size, matrix.size)
        order = np.arange(matrix.size).reshape(matrix.shape)
        want = exact.block_norms(dense, order if side == "row" else order.T)
        # float32 rounding of the products, some 1e-6, and what 100 iterations leave.
        np.testing.assert_allclose(found[name], want, rtol=1e-4)


def test_hessian_between_blocks_does_not_enter():
    """H with nothing but what is between rows: every block is zero, and nothing is not a number."""
    hessian = symmetric(20)
    for block in PLACES:
        hessian[np.ix_(block, block)] = 0
    found = of_quadratic(hessian, SHAPE)
    np.testing.assert_array_equal(found, np.zeros(4))


def test_norm_of_an_indefinite_block_with_eigenvalues_of_one_size():
    """diag(3, -3, 1): no eigenvector is found, but the norm is."""
    found = of_quadratic(np.diag([3.0, -3.0, 1.0]), (1, 3), key=jax.random.key(2))
    np.testing.assert_allclose(found, [3], rtol=1e-6)


def test_more_iterations_raise_the_norm():
    runs = [of_quadratic(symmetric(60), (3, 20), iterations=n) for n in (1, 5, 25, 125)]
    norms = np.array(runs)
    want = exact.block_norms(symmetric(60), np.arange(60).reshape(3, 20))
    assert np.all(np.diff(norms, axis=0) > -1e-6 * want)
    assert np.all(norms <= want * (1 + 1e-5))


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_curvature_scales_with_the_loss(scale):
    both = [of_quadratic(c * symmetric(20), SHAPE) for c in (1.0, scale)]
    np.testing.assert_allclose(both[1] / scale, both[0], rtol=1e-4)


@pytest.mark.cpu_program
def test_no_dense_hessian_is_in_memory():
    """The Hessian of a 64 x 64 matrix would be 64 MiB; all rows' norms take a few."""

    def norms(x):
        def loss(m):
            return jnp.mean(jnp.tanh(jnp.ones((16, 64)) @ m["w"]) ** 2)

        return theory.block_curvatures(loss, {"w": x}, key=jax.random.key(0))["w"]

    compiled = jax.jit(norms).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21


def of_rows(scale):
    """L = sum_i h_i |w_i|^2 / 2 over rows, the curvatures, and a point."""
    h = jnp.asarray(scale, jnp.float32)[:, None]

    def loss(matrices):
        return 0.5 * jnp.sum(h * jnp.square(matrices["w"]))

    rng = np.random.default_rng(5)
    w = {"w": jnp.asarray(rng.standard_normal((len(scale), 4)), jnp.float32)}
    return loss, theory.block_curvatures(loss, w, key=jax.random.key(0)), w


def test_bound_is_exact_where_blocks_are_multiples_of_the_identity():
    loss, curvatures, at = of_rows(np.random.default_rng(5).uniform(0.5, 4, 6))
    gradients = jax.grad(loss)(at)
    update = jnp.asarray(np.random.default_rng(7).standard_normal((6, 4)), jnp.float32)
    bound = theory.descent_bound(curvatures, gradients, {"w": update})["w"]
    for eta in (0.1, float(bound.step_size)):
        change = loss({"w": at["w"] - eta * update}) - loss(at)
        want = -eta * bound.slope + eta**2 / 2 * bound.curvature
        np.testing.assert_allclose(change, want, rtol=1e-3, atol=1e-5)
    lowest = loss(at) - loss({"w": at["w"] - bound.step_size * update})
    np.testing.assert_allclose(bound.decrease, lowest, rtol=1e-3)
    mean = bound.curvature / jnp.sum(update**2)
    np.testing.assert_allclose(bound.mean_curvature, mean, rtol=1e-5)


def test_slope_of_the_polar_factor_is_the_nuclear_norm_and_flat_updates_meet_less_curvature():
    """Gradient and curvature both large in the same rows, as the paper finds: Muon+ meets less."""
    scale = np.linspace(1, 4, 8) ** 2
    loss, curvatures, at = of_rows(scale)
    gradients = jax.grad(loss)(at)
    factor = omp.polar.svd(gradients["w"])
    flat = omp.matrices.normalize_matrix(factor, "row")
    sharp, even = (
        theory.descent_bound(curvatures, gradients, {"w": u})["w"] for u in (factor, flat)
    )
    nuclear = np.linalg.svd(gradients["w"], compute_uv=False).sum()
    np.testing.assert_allclose(sharp.slope, nuclear, rtol=1e-5)
    # Rows of equal norms weigh all curvatures alike.
    np.testing.assert_allclose(even.mean_curvature, np.mean(scale), rtol=1e-4)
    assert even.mean_curvature < sharp.mean_curvature


def test_a_zero_update_gains_nothing_and_scale_cancels():
    loss, curvatures, at = of_rows(np.arange(1.0, 5.0))
    gradients = jax.grad(loss)(at)
    zero, one, ten = (
        theory.descent_bound(curvatures, gradients, jax.tree.map(lambda g, c=c: c * g, gradients))
        for c in (0, 1, 10)
    )
    assert all(float(value) == 0 for value in zero["w"])
    for name, power in zip(theory.DescentBound._fields, (1, 2, 0, -1, 0), strict=True):
        small, large = getattr(one["w"], name), getattr(ten["w"], name)
        np.testing.assert_allclose(large, small * 10.0**power, rtol=1e-4)
