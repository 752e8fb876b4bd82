"""Derivatives through an update, for learning to learn, where gradients have zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import contrib as rivals
from optax_muonplus._core.precision import times_pow2
from tests.support.contrib import NAMES, optimizer

PARAMS = jax.random.normal(jax.random.key(0), (4, 6))
GRADS = jax.random.normal(jax.random.key(1), (4, 6))
# Kernels are stored as (in, out): a zero row of the array is a dead input.
ZEROS = {
    "a zero matrix": jnp.zeros_like(GRADS),
    "a zero row": GRADS.at[2].set(0),
    "a zero column": GRADS.at[:, 3].set(0),
    "rank one": jnp.outer(GRADS[:, 0], GRADS[0]),
}
RULES = {name: functools.partial(optimizer, name, 0.02) for name in NAMES}
RULES |= {"muon": functools.partial(omp.muon, 0.02)}
OPTIONS = [
    {},
    {"norm": "row", "norm_eps": 0.0},
    {"norm": "long", "match_frobenius": True},
    {"preconditioning": "schatten"},
    {"preconditioning": "aol"},
    {"adaptive": True},
    {"consistent_rms": 0.2},
    {"eps": 0.0, "bias_correction": True},
]
RULES |= {str(x): functools.partial(omp.muonplus, 0.02, **x) for x in OPTIONS}
RULES["both, norm_eps=0"] = functools.partial(
    omp.optimizer, rivals.scale_by_muoneq(balance=rivals.Balance("both", 0.0)), 0.02
)
RULES["paper"] = functools.partial(omp.optimizer, rivals.NorMuon(rule="paper"), 0.02)


@pytest.mark.parametrize("name", RULES)
def test_derivatives_are_numbers_in_both_modes(name):
    tx = RULES[name]()

    def loss(g):
        params, grads = {"w": PARAMS}, {"w": g}
        updates, _ = tx.update(grads, tx.init(params), params)
        return jnp.sum(updates["w"] ** 2 + updates["w"])

    def both(g):
        return jax.grad(loss)(g), jax.jvp(loss, (g,), (GRADS,))[1]

    reverse, forward = jax.jit(jax.vmap(both))(jnp.stack(list(ZEROS.values())))
    for i, kind in enumerate(ZEROS):
        assert np.all(np.isfinite(reverse[i])), kind
        along = float(jnp.vdot(reverse[i], GRADS))
        np.testing.assert_allclose(forward[i], along, rtol=1e-2, atol=1e-3, err_msg=kind)
    if name != "mano":  # its docstring says how large it is
        np.testing.assert_array_equal(reverse[0], 0)


def test_roots_have_the_derivative_zero_at_zero():
    x = jnp.array([0.0, 4.0, 16.0])
    for degree, expected in ((2, [0, 2, 4]), (4, [0, 2**0.5, 2])):
        root = functools.partial(omp.matrices.root, degree=degree)
        np.testing.assert_allclose(root(x), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(lambda x, r=root: r(x).sum())(x)[0], 0)
    assert np.isnan(omp.matrices.root(jnp.nan))


def test_powers_of_two_count_as_constants():
    """A quotient times its power is the number itself, and has the derivative 1."""

    def there_and_back(x):
        quotient, power = omp.matrices.scale_by_pow2(x)
        return jnp.sum(times_pow2(quotient, power))

    np.testing.assert_array_equal(jax.grad(there_and_back)(3 * GRADS), 1)


def test_the_rest_needs_an_epsilon_inside_the_root():
    """As Optax says of its Adam."""
    params = {"bias": jnp.ones(3)}

    def loss(g, eps_root):
        tx = omp.muonplus(0.02, adam_eps_root=eps_root)
        updates, _ = tx.update({"bias": g}, tx.init(params), params)
        return optax.tree.sum(updates)

    assert np.all(np.isfinite(jax.grad(loss)(jnp.zeros(3), 1e-16)))
