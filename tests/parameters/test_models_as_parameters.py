"""Models and states in place of parameters: a sentence says where the parameters are."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_muonplus as omp

PARAMS = {"dense": {"kernel": jnp.ones((4, 6))}}
MLP = eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
STATS = {"params": PARAMS, "batch_stats": {"norm": {"mean": jnp.ones(6)}}}


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


NOISY, PLAIN = Noisy(nnx.Rngs(0)), nnx.Linear(4, 6, rngs=nnx.Rngs(0))
NNX = (
    r"Got a Flax model of which drop/rngs/count RngCount, .*norm/mean BatchStat.* are not trained:"
    r" pass nnx\.state\(model, nnx\.Param\)\."
)
WRONG = {
    "nnx": (NOISY, NNX),
    "nnx state": (nnx.state(NOISY), NNX),
    "nnx optimizer": (
        nnx.Optimizer(PLAIN, optax.sgd(0.1), wrt=nnx.Param),
        r"Got an Optimizer.*pass nnx\.state\(model, nnx\.Param\)",
    ),
    "linen module": (
        nn.Dense(6),
        r"Got Dense in place of parameters\. They are variables\['params'\] in Flax Linen, nnx",
    ),
    "class": (Noisy, "Got Noisy in place of parameters"),
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
        if use is omp.describe and given is MLP:
            continue  # it reads the arrays of a model
        with pytest.raises(ValueError, match=message):
            use(given)


def test_parameters_alone_are_taken():
    omp.muonplus(0.1).init({"params": PARAMS})
    omp.describe(eqx.filter(MLP, eqx.is_inexact_array))
    assert "up/kernel" in omp.describe(nnx.state(NOISY, nnx.Param))
    assert omp.describe(PLAIN) == omp.describe(nnx.state(PLAIN, nnx.Param))
    labels = nnx.map_state(lambda path, x: isinstance(x, nnx.Param), nnx.state(NOISY))
    optax.masked(omp.muonplus(0.1), labels).init(nnx.state(NOISY))
    frozen = optax.masked(omp.muonplus(0.1), {"params": True, "batch_stats": False})
    frozen.init(STATS)


def test_what_is_no_float_is_pointed_out():
    table = omp.describe({**PARAMS, "count": jnp.zeros([], jnp.int32), "key": jax.random.key(0)})
    assert "not floating-point, which optimizers refuse: count int32, key key<fry>" in table
