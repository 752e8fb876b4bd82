"""Zero, degenerate, tiny and huge gradients, weight decay without gradients, empty trees."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from optax_muonplus._core.normalize import Norm
from tests.support.platforms import LESS_EXACT
from tests.support.trees import SHAPES, assert_trees_close, first_update, random_tree

POLARS = [
    *({"preconditioning": word} for word in ("frobenius", "spectral", "schatten", "aol")),
    {"polar": "svd"},
]
# They scale by bounds of the Gram matrix, as others do.
BOUNDS = ({"preconditioning": "schatten"},)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_zero_gradients_give_zero_updates(dtype):
    """On the first step, in every dtype, with and without epsilons; decay goes on as ever."""
    with jax.enable_x64(dtype == "float64"):
        zero = jnp.zeros((3, 4), dtype)
        extra = {"norm_eps": 0.0, "eps": 0.0, "match_frobenius": True, "adaptive": True}
        more = [{}, extra] if dtype == "float32" else [{}]
        variants = [{**options, **each} for options in POLARS for each in more]
        transformations = [omp.scale_by_muonplus(**options) for options in variants]
        updates = jax.jit(lambda g: [tx.update(g, tx.init(g))[0] for tx in transformations])(zero)
        for options, update in zip(variants, updates, strict=True):
            np.testing.assert_array_equal(update, zero, err_msg=str(options))
        decayed = first_update(omp.muonplus(0.5, weight_decay=0.25), {"w": zero}, {"w": zero + 1})
        np.testing.assert_array_equal(decayed["w"], zero - 0.125)


@pytest.mark.parametrize("options", POLARS, ids=str)
def test_degenerate_gradients_give_finite_updates(options):
    """Finite; what is zero stays zero; 1 x n and n x 1 give unit vectors under an exact factor."""
    svd = options.get("polar") == "svd"
    rng = np.random.default_rng(0)
    full = rng.normal(size=(6, 9)).astype(np.float32)
    grads = {
        "zero_input": np.where(np.arange(6)[:, None] == 2, 0, full),
        "zero_output": np.where(np.arange(9) == 2, 0, full),
        "rank_one": np.outer(full[:, 0], full[0]),
        "one_entry": np.zeros_like(full) + np.eye(6, 9, 3) * (np.arange(6) == 1)[:, None],
        "identical_rows": np.ones((6, 9), np.float32),
        "one_input": full[:1],
        "one_output": full[:, :1],
        "scalar": full[:1, :1],
        "huge": full * 1e37,
        "tiny": full * 1e-37,
        "underflowing": full * np.float32(1e-40),
    }
    grads = {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}
    # By the default rules (1, n) is a vector.
    where = omp.Matrices(weight_dimension_numbers=dict.fromkeys(grads, MuonDimensionNumbers(0, 1)))
    transformations = [
        omp.scale_by_muonplus(norm=norm, shape_scale="none", **extra, **options, where=where)
        for norm, extra in [
            ("none", {}),
            ("col_row", {"norm_eps": 1e-8 if svd else 0.0, "match_frobenius": True}),
            ("row_col", {}),
        ]
    ]
    results = jax.jit(lambda g: [tx.update(g, tx.init(g))[0] for tx in transformations])(grads)
    for updates in results:
        for key, update in updates.items():
            assert np.all(np.isfinite(update)), key
        # A singular vector's zeros are zeros to 6e-8, which norm_eps = 1e-8 lets grow to 6e-4.
        noise = 1e-2 * LESS_EXACT if svd else 0.0
        assert np.abs(updates["zero_input"][2]).max() <= noise
        assert np.abs(updates["zero_output"][:, 2]).max() <= noise
        assert np.count_nonzero(updates["one_entry"]) == 1
    if svd:
        for key in ("one_input", "one_output", "rank_one", "scalar"):
            size = np.linalg.norm(grads[key])
            np.testing.assert_allclose(results[0][key], grads[key] / size, rtol=1e-5, atol=1e-6)


def test_empty_trees_and_missing_leaves():
    tx = omp.muonplus(0.1)
    for empty in ({}, {"a": {}}, {"a": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert updates == empty
    grads = random_tree(SHAPES)
    with_none = {**grads, "frozen": {"kernel": None}, "act": None}
    updates = first_update(tx, with_none)
    assert updates["frozen"] == {"kernel": None}
    assert updates["act"] is None
    assert_trees_close({k: updates[k] for k in SHAPES}, first_update(tx, grads))


def test_no_infinity_arises_on_the_way():
    """``jax_debug_infs`` looks at every result outside of ``jax.jit``."""
    grads = random_tree({"small": (4, 6), "up": (4, 6), "bias": (6,)})
    grads["small"] *= 1e-8
    tx = omp.muonplus(0.1, adaptive=True, bias_correction=True)
    jax.config.update("jax_debug_infs", True)
    try:
        tx.update(grads, tx.init(grads), grads)
    finally:
        jax.config.update("jax_debug_infs", False)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 6)])
def test_functions_on_matrices_take_empty_ones(shape):
    x = jnp.ones(shape)
    functions = [omp.polar.polar_factor, omp.polar.svd]
    functions += [omp.matrices.Normalize(norm) for norm in get_args(Norm)]
    for function in functions:
        assert function(x).shape == shape


@pytest.mark.parametrize(
    "options, dtype",
    [*((x, np.float32) for x in POLARS), *((x, np.complex64) for x in POLARS if x not in BOUNDS)],
    ids=str,
)
def test_gradients_of_every_size_give_one_update(options, dtype):
    """c * G for c from 1e-20 to 1e20 (and a zero among them), each matrix of a stack by itself."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=(6, 9))
    if dtype == np.complex64:
        g = g + 1j * rng.normal(size=(6, 9))
    sizes = np.array([0.0, *10.0 ** np.arange(-20, 21)])
    stack = jnp.asarray((sizes[:, None, None] * g).astype(dtype))
    tx = omp.scale_by_muonplus(
        **options, where=omp.Matrices(weight_dimension_numbers=MuonDimensionNumbers(1, 2))
    )
    updates = np.asarray(first_update(tx, stack))
    assert not np.any(updates[0])
    reference = updates[21]  # c = 1
    # c * G is rounded to 6e-8, which no singular value here is small enough to amplify by 50.
    error = np.abs(updates[1:] - reference).max(axis=(1, 2)) / np.abs(reference).max()
    slack = LESS_EXACT if options.get("preconditioning") == "spectral" else 1
    assert error.max() < 3e-6 * slack, dict(zip(sizes[1:], error, strict=True))
    assert np.abs(reference).max() > 0.1


@pytest.mark.parametrize(("options", "steps"), [({}, 1400), ({"eps": 1e-8}, 410)])
def test_updates_go_on_after_the_last_gradient(options, steps):
    """The pages on experts and on troubles have these numbers, for a momentum of norm 1.

    It falls by 0.95 a step until ``eps`` is as large: log(1e30) / log(1 / 0.95) = 1347 and 359;
    five steps of the iteration take what is smaller to full size for 10 to 90 more.
    """
    params = {"up": {"kernel": jnp.asarray(np.eye(32, 48), jnp.float32) / np.sqrt(32)}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = omp.scale_by_muonplus(**options)
    state = optax.tree.set(tx.init(params), mu=params)

    def step(state, _):
        updates, state = tx.update(zeros, state)
        return state, jnp.linalg.norm(updates["up"]["kernel"])

    norms = np.asarray(jax.lax.scan(step, state, length=2000)[1])
    assert abs(int((norms >= 0.9 * norms[0]).sum()) - steps) < 50
