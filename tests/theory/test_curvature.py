"""Curvatures of blocks against dense Hessians, in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import theory
from tests.support import reference_theory as exact
from tests.support.curvature import (
    compiled,
    flat,
    in_tree,
    mlp,
    mlp_loss,
    numbers,
    places,
    quadratic,
    symmetric,
)


def both_ways(rows):
    """Places by row, and by column."""
    return rows, rows.T


def row_and_column_places():
    """For each layout: path, dimension numbers, places, and for each matrix its (rows, columns)."""
    kernel, weight = places((5, 4)), places((4, 5))
    query, out, stacked = places((5, 2, 3)), places((2, 3, 5)), places((2, 3, 4))
    layers_last, outputs, inputs = places((3, 4, 2)), places((4, 7)), places((7, 4))
    flat_query, flat_out = query.reshape(5, 6), out.reshape(6, 5)
    scanned, unusual = omp.MuonDimensionNumbers(1, 2), omp.MuonDimensionNumbers(1, 0)
    cut_outputs = omp.MatrixSpec(0, 1, split_sizes=(3, 4))
    cut_inputs = omp.MatrixSpec(0, 1, split_sizes=(3, 4), split_axis=0)
    by_output = [both_ways(x.T) for x in (outputs[:, :3], outputs[:, 3:])]
    by_input = [both_ways(x.T) for x in (inputs[:3], inputs[3:])]
    by_layer = [both_ways(layers_last[..., i]) for i in range(2)]
    return {
        "in, out": ("dense/kernel", None, kernel, [both_ways(kernel.T)]),
        "out, in": ("dense/weight", None, weight, [both_ways(weight)]),
        "heads": ("query/kernel", None, query, [both_ways(flat_query.T)]),
        "heads back": ("out/kernel", None, out, [both_ways(flat_out.T)]),
        "layers": ("layers/kernel", scanned, stacked, [both_ways(x.T) for x in stacked]),
        "layers last, out first": ("layers/kernel", unusual, layers_last, by_layer),
        "fused outputs": ("qkv/kernel", cut_outputs, outputs, by_output),
        "fused inputs": ("down/kernel", cut_inputs, inputs, by_input),
    }


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
