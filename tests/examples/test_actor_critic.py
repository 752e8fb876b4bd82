"""The script of an actor and a critic: who gets what, its pole, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from examples import actor_critic


def agent():
    keys = jax.random.split(jax.random.key(0))
    outputs = {"actor": 2, "critic": 1}
    return {
        name: actor_critic.network(key, (4, 64, 64, n))
        for key, (name, n) in zip(keys, outputs.items(), strict=True)
    }


def test_outputs_of_actor_and_critic_get_adamw():
    labels = omp.partition_labels(agent())
    for role in ("actor", "critic"):
        found = [labels[role][f"layer_{i}"]["kernel"] for i in range(3)]
        assert found == ["muon", "muon", "adam"]


def test_a_pole_falls_to_the_side_to_which_it_leans():
    state = jnp.array([[0.0, 0.0, 0.05, 0.0], [0.0, 0.0, -0.05, 0.0]])
    side = jnp.zeros(2)
    for step in range(100):
        state, fallen = actor_critic.pole_and_cart(state, jnp.full(2, step % 2))
        side = jnp.where(fallen & (side == 0), jnp.sign(state[:, 2]), side)
    assert side.tolist() == [1, -1]


def test_advantages_are_the_sums_of_discounted_errors():
    rng = np.random.default_rng(0)
    values, last = rng.normal(size=(6, 3)), rng.normal(size=3)
    fallen = rng.random((6, 3)) < 0.3
    found = actor_critic.advantages(*map(jnp.asarray, (values, last, fallen)))
    expected, after, following = np.zeros((6, 3)), np.zeros(3), last
    for t in reversed(range(6)):
        goes_on = ~fallen[t]
        error = goes_on * (1 + 0.99 * following) - values[t]
        expected[t] = after = error + 0.99 * 0.95 * goes_on * after
        following = values[t]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_agent_learns_to_balance():
    tx = optax.chain(optax.clip_by_global_norm(1.0), omp.muonplus(**actor_critic.OPTIONS))
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        lengths = list(actor_critic.train(tx, agent(), iterations=60))
    assert np.mean(lengths[:3]) < 30  # of a pole that is pushed at random
    assert np.mean(lengths[-10:]) > 100
