"""Arguments that have no effect beside others are taken, and named by `describe`."""

import inspect
import re

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.trees import random_tree


def own_polar(x):
    return x


def everywhere(params):
    return jax.tree.map(lambda _: True, params)


@pytest.mark.parametrize(
    "arguments, idle",
    [
        ({"polar": "svd", "ns_steps": 7, "compute_dtype": "bfloat16"}, ["ns_steps, compute_dtype"]),
        ({"polar": own_polar, "eps": 1e-8, "ns_coeffs": "you"}, ["ns_coeffs, eps"]),
        ({"norm": "none", "norm_eps": 1e-6}, ["norm_eps"]),
        ({"norm": "none", "match_frobenius": True}, ["match_frobenius"]),
        ({"consistent_rms": 0.2, "shape_scale": "max"}, ["shape_scale"]),
        ({"beta": 0.0, "nesterov": False}, ["nesterov"]),
        ({"bias_correction": True, "nesterov": False}, ["bias_correction"]),
        ({"weight_decay_mask": everywhere, "ns_steps": 6}, ["weight_decay_mask"]),
        (
            {"beta": 0.0, "nesterov": False, "norm": "none", "norm_eps": 0.0},
            ["norm_eps", "nesterov"],
        ),
        # With an effect, or the defaults:
        ({"bias_correction": True}, []),
        ({"bias_correction": True, "nesterov": False, "adaptive": True}, []),
        ({"bias_correction": True, "nesterov": False, "eps": 1e-8}, []),
        ({"bias_correction": True, "nesterov": False, "polar": own_polar}, []),
        ({"polar": "svd", "ns_coeffs": "jordan", "norm": "row", "norm_eps": 1e-6}, []),
        ({"weight_decay_mask": everywhere, "weight_decay": 0.1, "learning_rate": 0.1}, []),
    ],
)  # fmt: skip
def test_arguments_without_effect_are_named_and_have_none(arguments, idle):
    params = random_tree({"up": {"kernel": (4, 6)}})
    table = omp.describe(params, **arguments)
    assert re.findall(r"^without effect: (.*), (?:beside|without) ", table, re.M) == idle

    def update(**arguments):
        tx = omp.muonplus(**{"learning_rate": 0.1, **arguments})
        return tx.update(params, tx.init(params), params)[0]["up"]["kernel"]

    names = {name for line in idle for name in line.split(", ")}
    effective = {name: x for name, x in arguments.items() if name not in names}
    if idle:
        np.testing.assert_allclose(update(**arguments), update(**effective), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"learning_rate": 0.02}, "adam_learning_rate is not given, and AdamW has learning_rate=0"),
        ({"learning_rate": lambda step: 0.02, "adam_learning_rate": 0.003}, "stays constant"),
        ({"learning_rate": 0.02, "adam_learning_rate": 0.003}, None),
        ({"learning_rate": 0.02, "consistent_rms": 0.2}, None),
        ({"learning_rate": 0.002}, "learning_rate=0.002 is of the order of AdamW's, by which matr"),
        ({"learning_rate": 0.002, "consistent_rms": 0.2}, None),
        ({"learning_rate": lambda step: 0.02}, None),
        ({}, None),
    ],
)
def test_a_rate_that_is_rarely_meant_for_its_group_is_said(arguments, line):
    table = omp.describe(random_tree({"up": {"kernel": (4, 6)}}), **arguments)
    assert (line in table) if line else ("learning_rate" not in table)


def test_a_state_over_replicas_without_a_mesh_is_said():
    table = omp.describe(random_tree({"up": {"kernel": (4, 6)}}), state_sharding="data")
    assert "without effect: state_sharding, since no parameter is known to be on a mesh" in table


def test_describe_has_the_arguments_of_muonplus_by_their_names():
    ours = inspect.signature(omp.describe).parameters
    assert ours["rules"].kind is inspect.Parameter.KEYWORD_ONLY
    assert set(inspect.signature(omp.muonplus).parameters) == set(ours) - {"params"}


def test_describe_refuses_what_muonplus_refuses():
    with pytest.raises(ValueError, match="ns_steps must be an integer"):
        omp.describe({}, ns_steps=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nstep'"):
        omp.describe({}, nstep=5)
