"""Momentum in eight bits: against NumPy, its error, its size, and states of other optimizers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.transforms import find_momentum
from tests.support import reference, reference_int8
from tests.support.batches import temporary_bytes
from tests.support.contrib import WITH_STATE, build
from tests.support.trees import random_tree

# Blocks of 256 and shorter, along the last axis and others, of several axes, and a whole long side.
SHAPES = [
    (0, 4),
    (),
    (5,),
    (6, 512),
    (512, 6),
    (10, 24),
    (7, 11),
    (64, 4, 8),
    (3, 8, 300),
    (3, 263),
    (5, 16, 16),
]
BETA = 0.9


def gradients(shape, count=5, seed=0):
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=shape)
    return [np.asarray(mean + rng.normal(size=shape), np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    "shape, nesterov",
    [*((shape, False) for shape in SHAPES), ((6, 512), True), ((10, 24), True)],
    ids=str,
)
def test_momentum_and_direction_are_those_of_numpy(shape, nesterov):
    grads = gradients(shape)
    tx = omp.momentum(BETA, nesterov=nesterov, mu_dtype="int8")
    state = tx.init(jnp.zeros(shape))
    update = jax.jit(tx.update)
    for g, m in zip(grads, reference_int8.average(grads, BETA), strict=True):
        direction, state = update(jnp.asarray(g), state)
        expected = BETA * m + (1 - BETA) * g if nesterov else m
        # A number halfway between two codes may go to either in float32: one step, of a few.
        largest = np.abs(expected).max(initial=0)
        wrong = np.abs(direction - expected) > 1e-5 * largest
        assert wrong.sum() <= 0.01 * wrong.size
        np.testing.assert_allclose(direction, expected, rtol=0, atol=largest / 100)
    assert state.codes.dtype == jnp.int8 and state.scales.dtype == jnp.float32
    found = find_momentum(state).mu
    assert found.dtype == jnp.float32


def test_updates_are_those_of_the_momentum_that_is_stored():
    grads = gradients((24, 256), 4)
    tx = omp.muonplus(0.1, beta=BETA, norm="none", shape_scale="none", mu_dtype="int8")
    params = {"up": {"kernel": jnp.zeros((24, 256))}}
    state = tx.init(params)
    for g in grads:
        updates, state = jax.jit(tx.update)({"up": {"kernel": jnp.asarray(g)}}, state, params)
    m = np.asarray(find_momentum(state).mu["up"]["kernel"], np.float64)
    direction = BETA * m + (1 - BETA) * grads[-1]
    expected = -0.1 * reference.polar_factor(direction)
    np.testing.assert_allclose(updates["up"]["kernel"], expected, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_after_200_updates_the_error_is_three_hundredths_at_most(noise):
    """Of the momentum in float64. An entry that stays has lost half a step each time at worst."""
    rng = np.random.default_rng(1)
    mean = rng.normal(size=(32, 512))
    tx = omp.momentum(0.95, nesterov=False, mu_dtype="int8")

    def update(state, g):
        return tx.update(g, state)[1], None

    grads = np.float32(mean + noise * rng.normal(size=(200, 32, 512)))
    state, _ = jax.jit(functools.partial(jax.lax.scan, update))(
        tx.init(jnp.zeros((32, 512))), grads
    )
    exact = np.zeros((32, 512))
    for g in grads:
        exact = 0.95 * exact + 0.05 * g
    found = np.asarray(find_momentum(state).mu, np.float64)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
    step = np.abs(exact).reshape(32, 2, 256).max(-1).repeat(256, -1) / 127
    assert np.all(np.abs(found - exact) <= 1.1 * step / 2 / 0.05)


def test_zeros_small_and_infinite_numbers():
    tx = omp.momentum(0.5, nesterov=False, mu_dtype=jnp.int8)
    state = tx.init(jnp.zeros((4, 256)))
    rows = np.float32([0, 1e-39, 1e38, 1])[:, None] * np.ones((4, 256), np.float32)
    rows[3, 7] = np.inf
    _, state = jax.jit(tx.update)(jnp.asarray(rows), state)
    found = np.asarray(find_momentum(state).mu)
    # A GPU keeps what is below the smallest normal number; a CPU makes zeros of it.
    np.testing.assert_allclose(found[:2], 0, atol=np.finfo(np.float32).tiny)
    np.testing.assert_allclose(found[2], 0.5e38, rtol=1e-2)
    assert not np.isfinite(found[3]).any()  # and other blocks do not see it


@pytest.mark.parametrize("dtype", ["uint8", "int16", int, "int"])
def test_other_integers_are_refused(dtype):
    with pytest.raises(ValueError, match="mu_dtype must be a floating-point dtype"):
        omp.muonplus(0.1, mu_dtype=dtype)
    with pytest.raises(ValueError, match="compute_dtype must be a floating-point dtype"):
        omp.muonplus(0.1, compute_dtype="int8")


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="mu_dtype=int8 cannot hold the momentum of complex"):
        omp.momentum(mu_dtype="int8").init(jnp.zeros((4, 4), complex))


@pytest.mark.parametrize("name", WITH_STATE)
def test_every_baseline_with_a_state_takes_it(name):
    rng = np.random.default_rng(2)
    params = {"up": jnp.asarray(rng.normal(size=(16, 256)), jnp.float32)}
    grads = [{"up": jnp.asarray(g)} for g in gradients((16, 256), 3)]
    made = {}
    for dtype in (None, "int8"):
        tx = build(name, mu_dtype=dtype)
        state, update = tx.init(params), jax.jit(tx.update)
        for g in grads:
            made[dtype], state = update(g, state, params)
        assert find_momentum(state).mu["up"].shape == (16, 256)
    difference = np.linalg.norm(made["int8"]["up"] - made[None]["up"])
    most = 0.15 if name == "adamuon" else 0.05  # which takes signs of the direction
    assert 0 < difference < most * np.linalg.norm(made[None]["up"])


@pytest.mark.cpu_program
@pytest.mark.parametrize("shape", [(128, 512), (512, 96), (8, 64, 64)], ids=str)
def test_temporary_memory_is_not_more_than_with_float32(shape):
    """Neither the sums nor the momentum that matrices are read from are kept for all leaves."""
    params = {f"layers_{i}": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for i in range(4)}
    options = {"layer_axes": {"layers": 0}} if len(shape) == 3 else {}
    plain = temporary_bytes(omp.muonplus(0.1, **options), params)
    assert temporary_bytes(omp.muonplus(0.1, mu_dtype="int8", **options), params) < 1.05 * plain


PARAMS = {"up": {"kernel": jnp.ones((16, 256)), "bias": jnp.zeros(256)}}


def after_two(tx):
    state = tx.init(PARAMS)
    for seed in range(2):
        grads = random_tree({"up": {"kernel": (16, 256), "bias": (256,)}}, seed)
        _, state = tx.update(grads, state, PARAMS)
    return state


@pytest.mark.parametrize(("old", "new"), [(None, "int8"), ("int8", None), ("int8", "int8")])
def test_states_are_taken_over_to_and_from_eight_bits(old, new):
    state = after_two(omp.muonplus(0.1, mu_dtype=old))
    tx = omp.muonplus(0.1, mu_dtype=new)
    taken, report = omp.take_over(state, tx.init(PARAMS), PARAMS)
    assert "up/kernel: momentum" in report.kept and not report.started_anew
    assert jax.tree.structure(taken) == jax.tree.structure(tx.init(PARAMS))
    wanted = find_momentum(state).mu["up"]["kernel"]
    error = 0.51 * np.abs(wanted).max() / 127 if new else 0
    found = find_momentum(taken).mu["up"]["kernel"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=error)


def test_a_state_in_float32_is_not_taken_for_one_in_eight_bits():
    state = omp.muonplus(0.1).init(PARAMS)
    with pytest.raises(ValueError, match=r"missing .*/codes/.*unknown .*/mu/"):
        omp.muonplus(0.1, mu_dtype="int8").update(PARAMS, state, PARAMS)


BAD_SCALES = {
    "shape": (lambda x: jnp.broadcast_to(x[:1], (1, *x.shape[1:])), "misfit .*/scales/"),
    "negative": (lambda x: x - 1, "scales of shape .* are negative or NaN"),
    "NaN": (lambda x: x * jnp.nan, "scales of shape .* are negative or NaN"),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_scales_that_nobody_stored_are_refused(name):
    """At an eager update; traced numbers are not known."""
    change, message = BAD_SCALES[name]
    tx = omp.muonplus(0.1, mu_dtype="int8")
    state = jax.tree.map_with_path(
        lambda keys, x: change(x) if ".scales" in jax.tree_util.keystr(keys) else x,
        tx.init(PARAMS),
    )
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, state, PARAMS)
