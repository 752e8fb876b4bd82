"""A state in the memory of the host between updates, by shardings alone."""

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import SHAPES, random_tree


def put(state, kind):
    """Arrays with axes in that memory; counts stay where they are."""
    where = jax.tree.map(
        lambda x: x.sharding.with_memory_kind(kind) if x.ndim else x.sharding, state
    )
    return jax.device_put(state, where)


@pytest.mark.parametrize("mu_dtype", [None, "int8"])
def test_updates_have_the_same_bits(mu_dtype):
    params = random_tree(SHAPES)
    tx = omp.muonplus(0.1, mu_dtype=mu_dtype)
    update = jax.jit(tx.update, donate_argnums=1)
    kept, away = tx.init(params), put(tx.init(params), "pinned_host")
    for seed in range(1, 4):
        grads = random_tree(SHAPES, seed)
        expected, kept = update(grads, kept, params)
        updates, state = update(grads, put(away, "device"), params)
        away = put(state, "pinned_host")
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(away) if x.ndim}
        assert kinds == {"pinned_host"}
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
    jax.tree.map(np.testing.assert_array_equal, put(away, "device"), kept)
