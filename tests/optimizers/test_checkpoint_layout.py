"""Paths of arrays in the states of optimizers, which checkpoints name them by."""

import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from tests.support.trees import by_path

PARAMS = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
ADAM = {f"inner_states/adam/inner_state/0/{x}" for x in ("count", "mu/dense/bias", "nu/dense/bias")}
MUON = "inner_states/muon/inner_state"
MU = f"{MUON}/0/0/mu/dense/kernel"
BASELINE_MU = f"{MUON}/0/momentum/mu/dense/kernel"


# As written by the first version that had the optimizer, mostly 0.1.0.
LAYOUTS = {
    "muonplus": (omp.muonplus, {MU}),
    "aurora": (omp.contrib.aurora, {MU}),
    "muoneq": (omp.contrib.muoneq, {MU}),
    "turbo_muon": (omp.contrib.turbo_muon, {MU}),
    "normuon": (omp.contrib.normuon, {BASELINE_MU, f"{MUON}/0/nu/dense/kernel"}),
    "adamuon": (omp.contrib.adamuon, {BASELINE_MU, f"{MUON}/0/nu/dense/kernel"}),
    "hyperball": (omp.contrib.hyperball, {MU}),
    "mano": (omp.contrib.mano, {BASELINE_MU, f"{MUON}/0/count"}),
}


def layout(tx):
    return set(by_path(tx.init(PARAMS)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_have_the_layout_of_earlier_checkpoints(name):
    optimizer, matrices = LAYOUTS[name]
    assert layout(optimizer(0.1)) == ADAM | matrices


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
