"""Arguments that cannot be right are refused when a transformation is built or initialised."""

import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp

MATRIX = {"up": {"kernel": jnp.ones((4, 6))}}


@pytest.mark.parametrize(
    "params, arguments, message",
    [
        (
            {"count": jnp.zeros((3, 4), jnp.int32)},
            {},
            r"must be floating-point, got count \(int32\)",
        ),
        ({"count": jnp.zeros(3, jnp.int32)}, {}, r"must be floating-point, got count \(int32\)"),
        (MATRIX, {"polar": lambda x: x[..., :1]}, r"up/kernel: .*must map .*gave \(1, 6, 1\)"),
        (
            {"up": {"kernel": jnp.ones((4, 6), jnp.complex64)}},
            {"compute_dtype": "bfloat16"},
            "up/kernel: compute_dtype=bfloat16 does not go with matrices of dtype complex64",
        ),
        (
            {"up": {"kernel": jnp.ones((4, 6), jnp.complex64)}},
            {"mu_dtype": "bfloat16"},
            "mu_dtype=bfloat16 cannot hold the momentum of complex parameters",
        ),
    ],
)
def test_init_names_the_leaf_that_does_not_fit(params, arguments, message):
    with pytest.raises(ValueError, match=message):
        omp.muonplus(0.1, **arguments).init(params)


def test_injected_hyperparameters_may_be_complex():
    """optax.inject_hyperparams gives all of them the dtype of the parameters."""
    params = {"w": jnp.ones((4, 6), jnp.complex64)}
    injected = optax.inject_hyperparams(omp.muonplus)(0.1)
    updates, _ = injected.update(params, injected.init(params), params)
    plain = omp.muonplus(0.1)
    expected, _ = plain.update(params, plain.init(params), params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)


def test_muon_has_the_arguments_of_muonplus_and_no_norm_by_default():
    plus = dict(inspect.signature(omp.muonplus).parameters)
    plus["norm"] = plus["norm"].replace(default="none")
    assert dict(inspect.signature(omp.muon).parameters) == plus


def test_every_keyword_of_optaxs_muon_is_taken():
    theirs = inspect.signature(optax.contrib.muon).parameters
    ours = inspect.signature(omp.muonplus).parameters
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert set(theirs) <= set(ours)
