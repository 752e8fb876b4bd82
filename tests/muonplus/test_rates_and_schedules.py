"""Learning rates and decays: negative ones, those that turn parameters round, and schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus import contrib

MATRIX = {"up": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
TAKES_A_RATE = {
    "learning_rate": lambda x: omp.muonplus(x),
    "adam_learning_rate": lambda x: omp.muonplus(0.1, adam_learning_rate=x),
    "weight_decay": lambda x: omp.muonplus(0.1, weight_decay=x),
    "adam_weight_decay": lambda x: omp.muonplus(0.1, adam_weight_decay=x),
}
OTHERS = [
    contrib.Hyperball,
    functools.partial(omp.optimizer, contrib.NorMuon()),
    lambda x: omp.optimizer(contrib.Mano(), 0.1, weight_decay=x),
]


@pytest.mark.parametrize("number", [-0.02, np.float32(-0.1), float("nan"), float("inf")])
def test_negative_rates_and_decays_are_refused(number):
    for name, make in TAKES_A_RATE.items():
        with pytest.raises(ValueError, match=f"{name} must be a finite number, not negative, or a"):
            make(number)
    for make in OTHERS:
        with pytest.raises(ValueError, match=r"(rate|decay) must be a finite number, not negative"):
            make(number)


def test_zero_and_traced_numbers_are_taken():
    for make in (*TAKES_A_RATE.values(), *OTHERS):
        make(0.0)
        jax.eval_shape(lambda x, make=make: make(x) and 0, jnp.float32(-0.1))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda rate, decay: omp.muonplus(rate, weight_decay=decay), "weight_decay"),
        (lambda rate, decay: omp.muonplus(rate, adam_weight_decay=decay), "adam_weight_decay"),
        (lambda rate, decay: omp.optimizer(contrib.NorMuon(), rate, decay), "weight_decay"),
    ],
)
def test_a_decay_that_turns_parameters_round_is_refused(make, name):
    """In units of the rate, for which an independent decay of 0.1 may be 100."""
    with pytest.raises(ValueError, match=f"{name}=20 times the learning rate 0.1 is more than 1"):
        make(0.1, 20)
    make(0.001, 100)
    make(optax.constant_schedule(0.1), 20)


@pytest.mark.parametrize(
    "schedule",
    [
        optax.cosine_decay_schedule(0.1, 100),
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100),
        optax.join_schedules([optax.constant_schedule(0.1), optax.constant_schedule(0.2)], [10]),
        lambda step: 0.1 if step < 5 else 0.2,  # of Python: no program, and no error when built
        lambda step, scale=0.1: scale * step,
        functools.partial(lambda scale, step: scale * step, 0.1),
        jax.jit(lambda step: 0.1 * step),
        lambda step: np.float32(0.1),
        lambda step: 1,
    ],
)
def test_schedules_of_every_form_are_taken(schedule):
    tx = omp.muonplus(schedule, adam_learning_rate=schedule)
    updates, _ = tx.update(MATRIX, tx.init(MATRIX), MATRIX)
    assert np.all(np.isfinite(updates["up"]["kernel"]))
