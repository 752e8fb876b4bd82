"""Mistakes that people make at their first try, and what is said to each.

No mistake is answered by a raw error of JAX, and none is silent. Mistakes that a whole table is
about are elsewhere: values of the wrong kind (`test_hyperparameters.py`), rates and schedules
(`test_rates_and_schedules.py`), chains
(`transforms/test_order.py`), states and gradients (`transforms/test_wrong_uses.py`), arrays
(`matrices/test_what_is_no_matrix.py`), rules (`tests/parameters`).
"""

import re

import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import baselines, transforms

PARAMS = {"up": {"kernel": jnp.ones((4, 6)), "bias": jnp.zeros(6)}}
TWO_EPS = omp.matrix_chain(omp.normalize(), baselines.Balance())


# A call, and what its error says.
MISTAKES = {
    "an option of another rule": (
        lambda: baselines.normuon(0.1, baselines.AdaMuon(), rule="paper"),
        "no argument rule with AdaMuon, Momentum, Orthogonalize, AdamW: none of them has it",
    ),
    "an option of two values": (
        lambda: omp.optimizer(TWO_EPS, 1, norm_eps=1),
        "in Normalize and in Balance: give it to one of them, as in Normalize(norm_eps=...)",
    ),
    "a decay for Hyperball": (
        lambda: omp.optimizer(baselines.Hyperball(0.1), 0.1, weight_decay=0.1),
        "The rule ends with Hyperball, which has a learning rate of its own and no weight decay",
    ),
    "a maker as rule": (lambda: omp.optimizer(omp.scale_by_muonplus, 0.1), "has to be called"),
    "a rate as rule": (lambda: omp.optimizer(0.1, omp.scale_by_muonplus()), "which is no link"),
    "positions of adamw": (lambda: omp.muonplus(3e-3, 0.9, 0.95), "adam_b1=0.9, adam_b2=0.95"),
    "a schedule of beta": (
        lambda: omp.muonplus(0.1, beta=lambda step: 0.9),
        "optax.inject_hyperparams makes",
    ),
    "a table beside an SVD": (
        lambda: omp.muonplus(0.1, "muonn", polar="svd"),
        "Unknown ns_coeffs 'muonn'. Known names: jordan",
    ),
    "optax.chain as chain": (
        lambda: transforms.partition_with_adamw(optax.chain(omp.momentum())),
        "optax_muonplus.matrix_chain(...) in place of optax.chain",
    ),
    "a mask of words": (
        lambda: omp.muonplus(0.1, weight_decay=0.1, weight_decay_mask=["bias"]),
        "lambda params: jax.tree.map(",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_a_remedy(name):
    """By this library: the last frames are its own, and none is of JAX or NumPy."""
    call, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(message)) as found:
        call()
    assert "optax_muonplus" in str(found.traceback[-1].path)
