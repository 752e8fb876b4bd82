"""Dtypes of updates and momentum, and where narrow ones are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import SHAPES, assert_trees_close, first_update, random_tree


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_updates_and_momentum(dtype):
    """Updates and buffers have the parameters' dtype, and are rounded to it once, at the end."""
    with jax.enable_x64(dtype == "float64"):
        shapes = {"up": (8, 12), "down": (12, 8)}
        params, grads = random_tree(shapes, 0, dtype), random_tree(shapes, 1, dtype)
        state, (updates, new) = _init_and_update(omp.muonplus(0.1), grads, params)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
        for s in (state, new):
            assert {x.dtype for x in jax.tree.leaves(s) if x.ndim} == {jnp.dtype(dtype)}

        tx = omp.scale_by_muonplus(match_frobenius=True)
        narrow = first_update(tx, grads)
        wide = first_update(tx, jax.tree.map(lambda x: x.astype(_wide(dtype)), grads))
        for key, expected in wide.items():
            # All but a few that lie between two numbers. Narrow sums would spoil most of them.
            assert np.mean(narrow[key] == expected.astype(dtype)) > 0.95


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def test_links_sum_float16_in_float32():
    """float16 ends at 65504: the squares of 300 are beyond it, their root is not."""
    (x,) = random_tree([(8, 12)])
    for link in (omp.orthogonalize(), omp.normalize("col_row", match_frobenius=True)):
        narrow, _ = link.update({"up": (300 * x).astype(jnp.float16)}, link.init({"up": x}))
        wide, _ = link.update({"up": 300 * x}, link.init({"up": x}))
        assert narrow["up"].dtype == jnp.float16
        assert_trees_close(narrow, wide, rtol=2e-3, atol=2e-3)


def test_mu_dtype_is_honoured_at_init_and_after_updates():
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = omp.muonplus(0.1, mu_dtype="bfloat16")
    state, (updates, new) = _init_and_update(tx, grads, params)
    for s in (state, new):
        matrices = [x for x in jax.tree.leaves(s) if x.ndim == 2]
        assert [x.dtype for x in matrices] == [jnp.bfloat16] * 2
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    # The buffer is rounded, what the polar factor is taken of is not.
    assert_trees_close(updates, first_update(omp.muonplus(0.1), grads, params))


def _init_and_update(tx, grads, params):
    state = tx.init(params)
    return state, jax.jit(tx.update)(grads, state, params)
