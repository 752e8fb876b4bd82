"""Transposing, permuting and exchanging inputs with outputs, and what a normalization leaves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import first_update, random_tree

NORMS = ("none", "col", "row", "col_row", "row_col", "long", "auto")


def _updates(grads, dims=None, **options):
    """Updates of several arrays with their own dimension numbers, in one program."""
    tx = omp.scale_by_muonplus(weight_dimension_numbers=dims, **options)
    return first_update(tx, grads)


def _identity(x):
    return x


@pytest.mark.parametrize("norm", NORMS)
def test_swapping_inputs_and_outputs_swaps_rows_and_columns(norm):
    """The update of W^T is the transpose of W's under the norm with its words swapped."""
    polar = "newton_schulz" if norm == "none" else _identity
    kernels = random_tree({"tall": (8, 12), "square": (8, 8)})
    swap = {"row": "col", "col": "row", "row_col": "col_row", "col_row": "row_col"}
    swapped = _updates(kernels, norm=norm, shape_scale="none", polar=polar)
    straight = _updates(
        jax.tree.map(jnp.transpose, kernels),
        norm=swap.get(norm, norm),
        shape_scale="none",
        polar=polar,
    )
    for key in kernels:
        np.testing.assert_allclose(straight[key].T, swapped[key], rtol=1e-4, atol=1e-5)


def test_permuting_units_permutes_the_update():
    (kernel,) = random_tree([(8, 12)])
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(8), rng.permutation(12)
    permuted = kernel[rows][:, columns]
    for options in ({"norm": "col_row"}, {"norm": "row_col", "preconditioning": "aol"}):
        updates = _updates({"given": kernel, "permuted": permuted}, **options)
        expected = updates["given"][rows][:, columns]
        np.testing.assert_allclose(updates["permuted"], expected, rtol=1e-4, atol=1e-5)


def test_exact_polar_factors_leave_one_side_to_normalize():
    """Square: none. More outputs than inputs: columns are unit already. Fewer: rows are."""
    grads = random_tree({"square": (8, 8), "tall": (8, 12), "wide": (12, 8)})
    updates = {norm: _updates(grads, polar="svd", norm=norm, shape_scale="none") for norm in NORMS}
    unchanged = {"square": NORMS, "tall": ("none", "col"), "wide": ("none", "row")}
    for key, norm in itertools.product(grads, NORMS):
        change = np.abs(updates[norm][key] - updates["none"][key]).max()
        assert change < 1e-6 if norm in unchanged[key] else change > 0.02, (key, norm)


def test_the_last_normalized_side_has_unit_norms():
    """To float32 rounding, in all three shapes, and if nothing was orthogonalized before."""
    grads = random_tree({"square": (8, 8), "tall": (8, 12), "wide": (12, 8)})
    for norm in ("col", "row", "col_row", "row_col"):
        axis = 0 if norm.endswith("row") else 1  # a row is an output unit: a column of (in, out)
        for key, update in _updates(grads, norm=norm, shape_scale="none", polar=_identity).items():
            sizes = np.linalg.norm(update, axis=axis)
            np.testing.assert_allclose(sizes, 1, rtol=1e-6, err_msg=f"{key} {norm}")
            other = np.linalg.norm(update, axis=1 - axis)
            assert np.abs(other - 1).max() > 0.01, "the other side should not be unit too"
