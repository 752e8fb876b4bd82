"""`optimizer` of any rule, with any transformation of Optax for the other parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import contrib
from optax_muonplus.transforms import run_plain

PARAMS = {"up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}}
GRADS = jax.tree.map(lambda x: np.float32(np.random.default_rng(0).normal(size=x.shape)), PARAMS)


def steps(tx, n=3):
    params, state, update = PARAMS, tx.init(PARAMS), jax.jit(tx.update)
    for i in range(n):
        grads = jax.tree.map(lambda x, i=i: jnp.sin(x * (i + 1)), GRADS)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_same(one, other):
    (found, state), (expected, wanted) = steps(one), steps(other)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    jax.tree.map(np.testing.assert_array_equal, state, wanted)


OTHERS = {"others": optax.nadamw(0.3, b2=0.9, weight_decay=0.2)}
ADAM = {"adam_learning_rate": 0.3, "adam_b2": 0.9, "adam_weight_decay": 0.2}


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_muonplus_is_what_a_user_can_write_with_optaxs_partition(decay):
    """To the last bit, state tree included; so is `optimizer`, and `others=` is the same AdamW."""
    links = (
        omp.scale_by_muonplus(beta=0.9),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(0.1),
    )
    groups = {"muon": omp.matrix_chain(*links), "adam": OTHERS["others"]}
    by_hand = optax.partition(groups, omp.partition_labels)
    ours = omp.muonplus(0.1, beta=0.9, weight_decay=decay, **ADAM)
    assert_same(by_hand, ours)
    assert_same(omp.optimizer(omp.scale_by_muonplus(beta=0.9), 0.1, decay, **OTHERS), ours)
    assert_same(omp.muonplus(0.1, beta=0.9, weight_decay=decay, **OTHERS), ours)


@pytest.mark.parametrize(
    "others", [optax.lion(1e-2), optax.sgd(0.1), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)]
)
def test_others_is_any_transformation_of_optax(others):
    found, _ = steps(omp.muonplus(0.1, others=others))
    bias = {"bias": PARAMS["up"]["bias"]}
    state = others.init(bias)
    for i in range(3):
        grads = {"bias": jnp.sin(GRADS["up"]["bias"] * (i + 1))}
        updates, state = others.update(grads, state, bias)
        bias = optax.apply_updates(bias, updates)
    np.testing.assert_allclose(found["up"]["bias"], bias["bias"], rtol=1e-6)
    expected, _ = steps(omp.muonplus(0.1))
    np.testing.assert_array_equal(found["up"]["kernel"], expected["up"]["kernel"])


@pytest.mark.several_devices
def test_moments_of_others_lie_like_the_parameters_when_made_under_jit():
    mesh = jax.make_mesh((4,), ("a",), (jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("a"))
    params = jax.device_put({"bias": jnp.ones(8)}, place)
    for others in (optax.lion(0.1), None):
        tx = omp.muonplus(0.1, others=others, sharding={"bias": place})
        moments = [x for x in jax.tree.leaves(jax.jit(tx.init)(params)) if x.ndim]
        assert moments and all(x.sharding.is_equivalent_to(place, 1) for x in moments)


@pytest.mark.parametrize(
    "rule", [omp.scale_by_muonplus(beta=0.5), contrib.NorMuon(), contrib.AdaMuon()]
)
def test_the_run_of_a_chain_reaches_rules(rule):
    calls = []

    def run(*args):
        calls.append(args)
        return run_plain(*args)

    tx = omp.optimizer(omp.matrix_chain(rule, run=run), 0.1)
    found, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert len(calls) == 1
    expected = omp.optimizer(rule, 0.1)
    expected, _ = expected.update(GRADS, expected.init(PARAMS), PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_parts_are_values():
    rule = contrib.NorMuon(beta2=0.5, momentum=omp.transforms.Momentum(0.5))
    tx = optax.inject_hyperparams(omp.optimizer)(rule, 0.1)
    assert tx.init(PARAMS).hyperparams.keys() == {"learning_rate", "weight_decay"}
    found, _ = steps(tx)
    expected, _ = steps(omp.optimizer(rule, jnp.float32(0.1)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
