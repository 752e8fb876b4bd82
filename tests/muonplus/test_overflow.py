"""Gradients near the largest number of their dtype: finite in, finite out, and the right update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._core.precision import saturating_cast
from tests.support.platforms import LESS_EXACT
from tests.support.trees import random_tree

FLAGS = {
    "nesterov, corrected": {"nesterov": True, "bias_correction": True},
    "corrected": {"bias_correction": True},
    "nesterov": {"nesterov": True},
    "plain": {},
}
DTYPES = ("float16", "bfloat16", "float32", "complex64")


def share(flags):
    """Of the largest number, in a gradient. A corrected momentum may be twice the gradient."""
    return 0.499 if flags.get("bias_correction") else 0.999


def gradients(dtype, share):
    """Largest entry ``share`` of the largest number; and the same of largest entry 1."""
    (g,) = random_tree([(4, 6)], dtype=dtype)
    g = g / jnp.max(jnp.abs(g))
    return {"w": (g * (share * float(jnp.finfo(dtype).max))).astype(dtype)}, {"w": g}


def run(tx, grads, params=None):
    """Three updates by the same gradients."""
    params = grads if params is None else params
    state = tx.init(params)
    seen = []
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        seen.append(np.asarray(updates["w"]))
    return np.stack(seen), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_update_of_huge_gradients_is_that_of_small_ones(flags, dtype):
    huge, small = gradients(dtype, share(flags))
    tx = omp.scale_by_muonplus(**flags)
    updates, _ = run(tx, huge)
    expected, _ = run(tx, small)
    rounding = float(jnp.finfo(dtype).eps)  # of the gradients themselves
    np.testing.assert_allclose(
        updates.astype(np.complex64), expected.astype(np.complex64), atol=100 * rounding
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_adaptive_updates_are_exact_or_the_largest_number(flags, dtype):
    """The dual norm of a matrix may be beyond all numbers; of a smaller one it is not."""
    largest = float(jnp.finfo(dtype).max)
    most = share(flags)
    for size, options in [(most, {"consistent_rms": 3.0}), (most, {}), (0.05, {})]:
        tx = omp.scale_by_muonplus(adaptive=True, **options, **flags)
        huge, small = gradients(dtype, size)
        updates, _ = run(tx, huge)
        assert np.all(np.isfinite(updates))
        expected = run(tx, small)[0].astype(np.complex128) * size
        for part, want in [(updates.real, expected.real), (updates.imag, expected.imag)]:
            clipped = np.clip(np.asarray(want, np.float64), -1, 1)
            found = np.asarray(part, np.float64) / largest
            rounding = LESS_EXACT * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(found, clipped, atol=100 * rounding)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_momentum_alone_is_right_as_far_as_it_can_be_told(bias_correction):
    """With both corrections it is up to 1.5 times the gradient, and no step on the way is more."""
    huge, small = gradients("float32", 0.6)
    tx = omp.momentum(nesterov=True, bias_correction=bias_correction)
    size = 0.6 * float(jnp.finfo("float32").max)
    np.testing.assert_allclose(run(tx, huge)[0] / size, run(tx, small)[0], rtol=1e-5)


def test_narrow_buffers_hold_the_largest_number_in_place_of_infinity():
    (g,) = random_tree([(4, 6)])
    tx = omp.scale_by_muonplus(mu_dtype="float16")
    updates, state = run(tx, {"w": g * 1e7})
    buffer = np.asarray(omp.transforms.find_momentum(state).mu["w"], np.float32)
    assert np.max(np.abs(buffer)) == 65504
    assert np.all(np.isfinite(updates))


def test_what_a_link_with_a_state_returns_stays_finite_in_float16():
    class Enlarged:
        def init(self, params, leaves):
            return optax.EmptyState()

        def update(self, updates, state, params, leaves):
            return jax.tree.map(lambda x: 1e6 * x.astype(jnp.float32), updates), state

    tx, grads = omp.matrix_chain(Enlarged()), {"w": jnp.ones((4, 6), jnp.float16)}
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_array_equal(updates["w"], np.full((4, 6), 65504, np.float16))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("options", [{}, {"adaptive": True}, {"mu_dtype": "float16"}], ids=str)
def test_what_was_not_finite_stays_so(bad, options):
    """``optax.apply_if_finite`` and its kin have to see it."""
    (g,) = random_tree([(4, 6)])
    tx = omp.scale_by_muonplus(**options)
    grads = {"w": g.at[1, 2].set(bad)}
    updates, state = tx.update(grads, tx.init(grads))
    assert not np.all(np.isfinite(updates["w"]))
    assert not np.all(np.isfinite(omp.transforms.find_momentum(state).mu["w"]))


@pytest.mark.parametrize(
    "by", ["normalize", "matched", "mano", "normuon", "adamuon", "aurora", "muoneq"]
)
def test_links_and_rivals_of_huge_gradients(by):
    """Squares of numbers above 1e19 overflow float32: rows of them were divided by infinity."""
    tx = {
        "normalize": omp.normalize(match_frobenius=False),
        "matched": omp.normalize("row"),
        "mano": omp.matrix_chain(omp.contrib.Mano()),
        "normuon": omp.matrix_chain(omp.contrib.NorMuon()),
        "adamuon": omp.matrix_chain(omp.contrib.AdaMuon(sign=False)),
        "aurora": omp.contrib.scale_by_aurora(),
        "muoneq": omp.contrib.scale_by_muoneq(),
    }[by]
    huge, small = gradients("float32", 0.6)
    params = {"w": random_tree([(4, 6)], 1)[0]}
    size = 0.6 * float(jnp.finfo("float32").max) if by == "matched" else 1
    found, expected = run(tx, huge, params)[0] / size, run(tx, small, params)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 0.1


def test_mano_without_eps_divides_by_no_zero():
    params = {"w": jnp.ones((4, 6))}
    tx = omp.matrix_chain(omp.contrib.Mano(eps=0.0))
    for grads in (params, jax.tree.map(jnp.zeros_like, params)):  # along the columns, and zero
        updates, _ = run(tx, grads, params)
        assert np.all(np.isfinite(updates))


def test_a_saturating_cast_keeps_infinities():
    x = jnp.array([1e5, -1e5, 65504, 1.5, jnp.inf, -jnp.inf, jnp.nan, 0])
    found = np.asarray(saturating_cast(x, "float16"))
    np.testing.assert_array_equal(found, [65504, -65504, 65504, 1.5, np.inf, -np.inf, np.nan, 0])
    assert np.isfinite(saturating_cast(jnp.array([3.4e38]), "bfloat16"))
