"""Schedule-free around an optimizer: which of its iterates decays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from examples.schedule_free import decayed, schedule_free
from tests.support.trees import random_tree

RATE, DECAY, B1 = 0.1, 0.5, 0.9


@pytest.mark.parametrize("wrapper", [schedule_free, optax.contrib.schedule_free])
def test_the_fast_iterate_decays_by_itself_or_by_where_gradients_are_taken(wrapper):
    params = random_tree({"up": {"kernel": (4, 6), "bias": (6,)}})
    tx = wrapper(omp.muonplus(RATE, beta=0.0, weight_decay=DECAY, adam_b1=0.0), RATE, b1=B1)
    plain = omp.muonplus(RATE, beta=0.0, adam_b1=0.0)
    state, other = tx.init(params), plain.init(params)
    z = x = y = jax.tree.map(np.float64, params)
    for step in range(1, 6):
        grads = jax.tree.map(lambda w, step=step: jnp.sin(7 * step + 9 * w), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        moved, other = plain.update(grads, other, params)
        decays = z if wrapper is schedule_free else y
        z = jax.tree.map(lambda z, u: z + np.float64(u), z, moved)
        z["up"]["kernel"] = z["up"]["kernel"] - RATE * DECAY * decays["up"]["kernel"]
        x = jax.tree.map(lambda x, z, step=step: x + (z - x) / step, x, z)
        y = jax.tree.map(lambda x, z: B1 * x + (1 - B1) * z, x, z)
        for found, expected in ((state.z, z), (params, y)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


def test_decay_of_the_other_iterate_swings_through_zero():
    slow, fast = (list(decayed(x, 601)) for x in (optax.contrib.schedule_free, schedule_free))
    assert min(z for _, z, _ in slow) < -0.2
    assert all(0 < z <= 1 and z <= y for _, z, y in fast)


def test_the_update_can_be_jitted_and_scanned():
    params = random_tree({"up": {"kernel": (4, 6)}})
    tx = schedule_free(omp.muonplus(RATE, beta=0.0), RATE)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), None

    (last, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=3)
    assert np.isfinite(last["up"]["kernel"]).all()
