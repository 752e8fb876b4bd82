"""Paths of arrays in the states of optimizers, which checkpoints name them by."""

import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from tests.support.contrib import optimizer
from tests.support.trees import by_path

PARAMS = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
ADAM = {f"inner_states/adam/inner_state/0/{x}" for x in ("count", "mu/dense/bias", "nu/dense/bias")}
MUON = "inner_states/muon/inner_state"
MU = f"{MUON}/0/0/mu/dense/kernel"
BASELINE_MU = f"{MUON}/0/momentum/mu/dense/kernel"


# As written by the first version that had the optimizer, mostly 0.1.0.
LAYOUTS = {
    "muonplus": {MU},
    "aurora": {MU},
    "muoneq": {MU},
    "turbo_muon": {MU},
    "normuon": {BASELINE_MU, f"{MUON}/0/nu/dense/kernel"},
    "adamuon": {BASELINE_MU, f"{MUON}/0/nu/dense/kernel"},
    "hyperball": {MU},
    "mano": {BASELINE_MU, f"{MUON}/0/count"},
}


def layout(tx):
    return set(by_path(tx.init(PARAMS)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_have_the_layout_of_earlier_checkpoints(name):
    made = omp.muonplus(0.1) if name == "muonplus" else optimizer(name, 0.1)
    assert layout(made) == ADAM | LAYOUTS[name]


def test_counters_of_schedules_and_bias_correction_have_it_too():
    counters = {
        "adam/inner_state/2/count",
        "muon/inner_state/0/0/count",
        "muon/inner_state/2/count",
    }
    expected = ADAM | {MU} | {f"inner_states/{counter}" for counter in counters}
    assert layout(omp.muonplus(lambda step: 0.1, bias_correction=True)) == expected


def test_a_recorder_has_it_too():
    record = {"count", "step", "names", "values"}
    tx = omp.contrib.recorded(omp.muonplus(0.1))
    assert layout(tx) == {f"inner/{path}" for path in ADAM | {MU}} | record
