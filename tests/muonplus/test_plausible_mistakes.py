"""Mistakes that people make at their first try, and what is said to each.

No mistake is answered by a raw error of JAX, and none is silent. Mistakes that a whole table is
about are elsewhere: values of the wrong kind (`test_hyperparameters.py`), rates and schedules
(`test_rates_and_schedules.py`), chains
(`transforms/test_order.py`), states and gradients (`transforms/test_wrong_uses.py`), arrays
(`core/test_integers.py`), rules (`tests/params`).
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import contrib

PARAMS = {"up": {"kernel": jnp.ones((4, 6))}}

# A call, and what its error says.
MISTAKES = {
    "a decay that is not small": (
        lambda: omp.optimizer(contrib.NorMuon(), 0.1, weight_decay=20),
        "weight_decay=20 times the learning rate 0.1 is more than 1",
    ),
    "arguments of AdamW beside others": (
        lambda: omp.muonplus(0.1, others=optax.lion(0.1), adam_b1=0.8, adam_learning_rate=0.1),
        "Arguments of AdamW would change nothing beside others=. Give them there.",
    ),
    "no rate for the others": (lambda: omp.optimizer(contrib.Hyperball(0.1), None), "pass others="),
    "a second rate": (
        lambda: omp.optimizer(contrib.Hyperball(0.1), 0.1),
        "The rule ends with Hyperball, which has a learning rate and makes whole steps downhill",
    ),
    "a step of a step": (
        lambda: contrib.hyperball(0.1, omp.matrix_chain(omp.momentum(), contrib.Hyperball(0.7))),
        "Hyperball after Hyperball: a link behind whole steps downhill",
    ),
    "a decay without a rate": (
        lambda: omp.optimizer(contrib.Hyperball(0.1), None, 0.1, others=optax.sgd(0.1)),
        "weight_decay is multiplied by the learning rate, which is None",
    ),
    "a class as rule": (lambda: omp.optimizer(contrib.NorMuon, 0.1), "which is not a link"),
    "a rate as rule": (
        lambda: omp.optimizer(0.1, omp.scale_by_muonplus()),
        "learning_rate must be a finite number",
    ),
    "positions of adamw": (lambda: omp.muonplus(3e-3, 0.9, 0.95), "ns_coeffs must be one row"),
    "a mapping of arguments": (
        lambda: omp.muonplus(0.1, omp.PAPER),
        "ns_coeffs must be one row (c_0, c_1, ...) of at least two numbers, or a sequence of",
    ),
    "a mesh as sharding": (
        lambda: omp.muonplus(0.1, sharding=jax.make_mesh((1,), ("a",))).init(PARAMS),
        "The shardings do not match the parameters: ",
    ),
    "a schedule of beta": (
        lambda: omp.muonplus(0.1, beta=lambda step: 0.9),
        "For other numbers use optax.inject_hyperparams",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_a_remedy(name):
    """By this library: the last frames are its own, and none is of JAX or NumPy."""
    call, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, AttributeError), match=re.escape(message)) as found:
        call()
    assert "optax_muonplus" in str(found.traceback[-1].path)
