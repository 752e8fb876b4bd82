"""Models and states in place of parameters: a sentence says where the parameters are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import optax_muonplus as omp

PARAMS = {"dense": {"kernel": jnp.ones((4, 6))}}
MLP = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
STATS = {"params": PARAMS, "batch_stats": {"norm": {"mean": jnp.ones(6)}}}
WRONG = {
    "equinox": (MLP, r"activation is a function, not an array.*eqx\.filter\(model, eqx\.is_in"),
    "variables": (STATS, r"batch_stats are not trained: pass variables\['params'\]"),
    "train state": (
        TrainState.create(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1)),
        r"Got a TrainState.*pass its \.params",
    ),
    "optimizer": (omp.muonplus(0.1), "Got an optimizer in place of parameters"),
    "words": ({"w": "kernel"}, "w is of type str, not an array"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_message_says_where_parameters_are(name):
    given, message = WRONG[name]
    for use in (omp.describe, omp.muonplus(0.1).init):
        with pytest.raises(ValueError, match=message):
            use(given)


def test_parameters_alone_are_taken():
    omp.muonplus(0.1).init({"params": PARAMS})
    omp.describe(eqx.filter(MLP, eqx.is_inexact_array))
    frozen = optax.masked(omp.muonplus(0.1), {"params": True, "batch_stats": False})
    frozen.init(STATS)
