"""Parameters in bfloat16 that move: remainders against float32 ones, random rounding on average."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.transforms import find_momentum, param_remainders, stochastic_rounding

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


def test_random_rounding_takes_a_neighbour_and_is_right_on_average():
    x = start()[:1, :1] * np.ones((1, 40_000), np.float32)
    x, step = x.astype(ml_dtypes.bfloat16), np.float32(0.0007)
    total = x.astype(np.float32) + step
    tx = stochastic_rounding(optax.scale(1.0), seed=3)
    new = taken(tx, jnp.asarray(x), [np.full(x.shape, step)])[0][0]
    values, counts = np.unique(np.asarray(new, np.float32), return_counts=True)
    assert len(values) == 2 and values[0] < total[0, 0] < values[1]
    share = (total[0, 0] - values[0]) / (values[1] - values[0])
    # The standard deviation of the share that is rounded up; 5 of it.
    allowed = 5 * np.sqrt(share * (1 - share) / x.size)
    np.testing.assert_allclose(counts[1] / x.size, share, atol=allowed)


def test_random_bits_depend_on_seed_update_and_parameter_alone():
    params = {"a": jnp.asarray(start()), "b": jnp.asarray(start())}
    grads = [{"a": jnp.full(SHAPE, 1e-3), "b": jnp.full(SHAPE, 1e-3)}] * 2

    def run(seed):
        return [
            params
            for params, _ in taken(stochastic_rounding(optax.scale(1.0), seed), params, grads)
        ]

    first, again, other = run(1), run(1), run(2)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (np.asarray(first[0]["a"]) != np.asarray(first[0]["b"])).any()
    assert (np.asarray(first[0]["a"]) != np.asarray(other[0]["a"])).any()
    moved = [np.asarray(x["a"], np.float32) for x in ({"a": start()}, *first)]
    assert ((moved[1] - moved[0] != 0) != (moved[2] - moved[1] != 0)).any()


@pytest.mark.parametrize("wrapped", [param_remainders, stochastic_rounding])
def test_infinite_and_replaced_parameters(wrapped):
    tx = wrapped(optax.scale(1.0))
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


@pytest.mark.parametrize("wrapped", [param_remainders, stochastic_rounding])
def test_nan_of_any_bits_stays_nan(wrapped):
    """NVIDIA's has all of them, so that a sum with noise would be -0."""
    nan = np.full(1000, 0x7FFFFFFF, np.uint32).view(np.float32)
    zeros = jnp.zeros(1000, jnp.bfloat16)
    found = taken(wrapped(optax.identity()), zeros, [nan])
    assert np.isnan(np.asarray(found[0][0], np.float32)).all()


@pytest.mark.parametrize("wrapped", [param_remainders, stochastic_rounding])
def test_states_of_others_are_refused(wrapped):
    tx, params = wrapped(optax.sgd(0.1)), {"a": jnp.ones(3, jnp.bfloat16)}
    with pytest.raises(ValueError, match="state of another optimizer"):
        tx.update(params, optax.sgd(0.1).init(params), params)


def test_state_of_other_parameters_is_refused():
    tx, params = param_remainders(optax.sgd(0.1)), {"a": jnp.ones(3, jnp.bfloat16)}
    state = tx.init({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="state does not fit the parameters"):
        tx.update(params, state, params)


@pytest.mark.parametrize("wrapped", [param_remainders, stochastic_rounding])
def test_wider_parameters_get_the_updates_of_the_inner_one(wrapped):
    inner = omp.muonplus(0.02, weight_decay=0.1)
    params = {"up": {"kernel": jnp.asarray(start(), jnp.float32)}, "bias": jnp.ones(3)}
    grads = jax.tree.map(jnp.cos, params)
    tx = wrapped(inner)
    state = tx.init(params)
    expected, _ = inner.update(grads, inner.init(params), params)
    updates, state = tx.update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    assert find_momentum(state) is not None


@pytest.mark.parametrize("wrapped", [param_remainders, stochastic_rounding])
def test_parts_of_a_model_that_are_not_trained(wrapped):
    """As Equinox has them: None in the updates, a function in the model."""
    tx = wrapped(optax.sgd(0.1))
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
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3, jnp.bfloat16)))
    stochastic_rounding(optax.scale(1.0), np.int64(3))
    for seed in (-1, 0.5, True, 2**32):
        with pytest.raises(ValueError, match="seed must be"):
            stochastic_rounding(optax.sgd(0.1), seed)
