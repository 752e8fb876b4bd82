"""Parameters in bfloat16 that move: with remainders as float32 ones do."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.transforms import find_momentum, param_remainders

SHAPE = (40, 25)


def steps(count=60, seed=0):
    """Steps from far below a bfloat16's distance up to ones that change the sign."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 0.5, size=(count, 1, SHAPE[1]))
    return np.asarray(rng.normal(size=(count, *SHAPE)) * sizes, np.float32)


def start(seed=1):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(ml_dtypes.bfloat16)


def taken(tx, params, grads):
    """All parameters and states on the way."""

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state, found = tx.init(params), []
    for grad in grads:
        params, state = step(params, state, grad)
        found.append((params, state))
    return found


def float32_of(params, remainders):
    """Both parts as one float32 number, by integers of 64 bits."""
    bits = np.asarray(params).view(np.uint16).astype(np.int64) << 16
    return (bits + np.asarray(remainders)).astype(np.uint32).view(np.float32)


def test_remainders_make_the_steps_of_float32():
    master = start().astype(np.float32)
    found = taken(param_remainders(optax.scale(1.0)), jnp.asarray(start()), steps())
    for step, (params, state) in zip(steps(), found, strict=True):
        master = master + step
        assert params.dtype == jnp.bfloat16 and state.remainders.dtype == jnp.int16
        np.testing.assert_array_equal(params, master.astype(ml_dtypes.bfloat16))
        both = float32_of(params, state.remainders)
        # One unit is lost halfway between two values, which is rare, and is then carried along.
        np.testing.assert_array_max_ulp(both, master, 1)
        assert (both == master).mean() > 0.99
        master = both


def test_many_steps_in_one_program():
    """XLA may leave out conversions to bfloat16 there."""
    tx = param_remainders(optax.scale(1.0))
    grads = steps()[:4]

    @jax.jit
    def all_at_once(params):
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(jnp.asarray(grad), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = all_at_once(jnp.asarray(start()))
    expected, last = taken(tx, jnp.asarray(start()), grads)[-1]
    np.testing.assert_array_equal(params, expected)
    np.testing.assert_array_equal(state.remainders, last.remainders)


def test_infinite_and_replaced_parameters():
    tx = param_remainders(optax.scale(1.0))
    big = float(jnp.finfo(jnp.bfloat16).max)
    params = jnp.asarray([1.0, big, 1.0, 1.0, -1.0], jnp.bfloat16)
    grads = jnp.asarray([jnp.nan, big, jnp.inf, 1e-3, 1e-3])
    found, state = taken(tx, params, [grads])[-1]
    np.testing.assert_array_equal(np.asarray(found, np.float32)[:3], [np.nan, np.inf, np.inf])
    # Whoever sets parameters meanwhile, to zero too, gets at most the old remainder with them.
    zero = jnp.zeros_like(params)
    updates, _ = tx.update(zero.astype(jnp.float32), state, zero)
    assert (np.abs(np.asarray(optax.apply_updates(zero, updates), np.float32)) < 1e-38).all()


def test_sums_in_the_middle_go_to_the_even_neighbour():
    """Where a remainder would be one more than 16 bits hold, and one unit is lost."""
    params = jnp.asarray([1.0, 1 + 2**-7], jnp.bfloat16)
    found, state = taken(param_remainders(optax.scale(1.0)), params, [jnp.full(2, 2.0**-8)])[-1]
    np.testing.assert_array_equal(np.asarray(found, np.float32), [1.0, 1 + 2**-6])
    np.testing.assert_array_equal(state.remainders, [0x7FFF, -0x8000])


def test_nan_of_any_bits_stays_nan():
    """NVIDIA's has all of them, so that a sum of integers may run over."""
    nan = np.full(1000, 0x7FFFFFFF, np.uint32).view(np.float32)
    zeros = jnp.zeros(1000, jnp.bfloat16)
    found = taken(param_remainders(optax.identity()), zeros, [nan])
    assert np.isnan(np.asarray(found[0][0], np.float32)).all()


def test_state_of_other_parameters_is_refused():
    tx, params = param_remainders(optax.sgd(0.1)), {"a": jnp.ones(3, jnp.bfloat16)}
    state = tx.init({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="missing a"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"NoneType in place of dict.*take_over"):
        tx.update(params, optax.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match=r"misfit a \(\(1,\) for \(3,\)\)"):
        tx.update(params, tx.init({"a": jnp.ones(1, jnp.bfloat16)}), params)


def test_wider_parameters_get_the_updates_of_the_inner_one():
    inner = omp.muonplus(0.02, weight_decay=0.1)
    params = {"up": {"kernel": jnp.asarray(start(), jnp.float32)}, "bias": jnp.ones(3)}
    grads = jax.tree.map(jnp.cos, params)
    tx = param_remainders(inner)
    state = tx.init(params)
    expected, _ = inner.update(grads, inner.init(params), params)
    updates, state = tx.update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    assert find_momentum(state) is not None


def test_parts_of_a_model_that_are_not_trained():
    """As Equinox has them: None in the updates, a function in the model."""
    tx = param_remainders(optax.sgd(0.1))
    params = {"w": jnp.ones(4, jnp.bfloat16), "act": None}
    state = tx.init(params)
    updates, _ = tx.update(
        {"w": jnp.ones(4, jnp.bfloat16), "act": None}, state, params | {"act": jax.nn.relu}
    )
    assert updates["act"] is None and updates["w"].dtype == jnp.float32


def test_wrong_input_is_refused():
    tx = param_remainders(optax.sgd(0.1))
    with pytest.raises(ValueError, match="blocks/up is float16"):
        tx.init({"blocks": {"up": jnp.ones(3, jnp.float16)}})
    with pytest.raises(ValueError, match="need params"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3, jnp.bfloat16)))
