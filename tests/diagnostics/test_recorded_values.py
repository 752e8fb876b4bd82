"""Recorded values against the float64 oracle, in every layout."""

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.diagnostics import read, recorded
from tests.support import reference
from tests.support.measures import (
    SIDES,
    correlation,
    distance,
    gaussian,
    ratio,
    rms,
    squares,
    variance,
)
from tests.support.records import ALL, DIMS, DISTANCE, run, tree


def matrices(params):
    """By path, the matrices (out, in) of a tree with SHAPES, in the shape that read gives them."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    split = lambda x, *stops: np.split(x, stops)  # noqa: E731
    return {
        "up/kernel": p["up"]["kernel"].T,
        "up2/kernel": p["up2"]["kernel"].T,
        "down/weight": p["down"]["weight"],
        "query/kernel": p["query"]["kernel"].reshape(6, 8).T,
        "scanned/kernel": [x.T for x in p["scanned"]["kernel"]],
        "fused/kernel": split(p["fused"]["kernel"].T, 4, 10),
        "experts/kernel": [[split(x.T, 3, 6) for x in row] for row in p["experts"]["kernel"]],
    }


def expected_values(moments, norm="row_col", norm_eps=1e-8, steps=5):
    """All measures of one matrix from its momentum, in float64."""
    polar = reference.newton_schulz(moments, steps=steps)
    m, n = moments.shape
    update = reference.norm_dir(polar, norm, norm_eps) * reference.shape_factor(m, n)
    update *= np.linalg.norm(polar) / np.linalg.norm(reference.norm_dir(polar, norm, norm_eps))
    values = {}
    for stage, x in {"momentum": moments, "polar": polar, "update": update}.items():
        values[f"{stage}/rms"] = rms(x)
        for side in SIDES:
            values[f"{stage}/{side}_variance"] = variance(x, side)
            values[f"{stage}/{side}_ratio"] = ratio(x, side)
    values["polar/distance"] = distance(polar, moments)
    for side in SIDES:
        values[f"polar/{side}_spearman"] = correlation(moments, polar, side)
        values[f"polar/{side}_floor_share"] = np.nan
    turns = () if norm == "none" else norm.split("_")
    for i, side in enumerate(turns):
        x = reference.norm_dir(polar, "_".join(turns[:i]) or "none", norm_eps)
        values[f"polar/{side}_floor_share"] = np.mean(squares(x, side) <= norm_eps)
    return values


def mapped(function, nested):
    """By measure, what ``function`` says of each matrix in nested lists."""
    if not isinstance(nested, list):
        return function(nested)
    each = [mapped(function, x) for x in nested]
    return {name: np.array([values[name] for values in each]) for name in each[0]}


def moments_of(grads, **flags):
    """What the polar step of the last update sees, in float64."""
    buffer = jax.tree.map(lambda g: np.zeros(g.shape), grads[0])
    for t, grad in enumerate(grads, 1):
        both = jax.tree.map(
            lambda m, g, t=t: reference.momentum(m, np.asarray(g, np.float64), t, **flags),
            buffer,
            grad,
        )
        moments, buffer = (jax.tree.map(lambda g, x, i=i: x[i], grad, both) for i in (0, 1))
    return moments


def assert_as_expected(given, expected, path):
    """Newton-Schulz amplifies rounding by its slope at 0, 3.44^5 = 500: 3e-5 of the norms.

    Variances, small differences of squares, see that ten times as large and more.
    """
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        assert np.shape(given[name]) == np.shape(value)
        np.testing.assert_allclose(
            given[name], value, rtol=1e-3, atol=1e-6, err_msg=f"{path} {name}"
        )


def test_recorded_values_are_those_of_the_algorithm():
    """For every layout: (in, out), (out, in), more axes, batches, fused blocks of two sizes."""
    flags = {"nesterov": True, "bias_correction": True}
    made = recorded(omp.muonplus, every=2)  # distances, whose SVD is slow to compile, are below
    _, state = run(made(0.1, weight_decay=0.1, muon_weight_dimension_numbers=DIMS, **flags))
    record = read(state)
    moments = matrices(moments_of([tree(1), tree(2)], **flags))
    assert record.step == 2 and record.values.keys() == moments.keys()
    for path, nested in moments.items():
        expected = mapped(expected_values, nested)
        assert_as_expected(record.values[path] | {DISTANCE: expected[DISTANCE]}, expected, path)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "norm": "row"},
        {"norm": "row_col", "norm_eps": 0.8},  # columns come below it when rows are normalized
        {"norm": "none", "ns_steps": 3},
    ],
    ids=str,
)
def test_recorded_values_follow_the_arguments(options):
    shapes = {"up": {"kernel": (6, 9)}}
    tx = recorded(omp.scale_by_muonplus, every=2, measures=ALL)(**options)
    _, state = run(tx, shapes=shapes)
    grads = [tree(step, shapes=shapes) for step in (1, 2)]
    moments = moments_of(grads, nesterov=options.get("nesterov", True))["up"]["kernel"].T
    rest = {word: options[word] for word in ("norm", "norm_eps") if word in options}
    expected = expected_values(moments, steps=options.get("ns_steps", 5), **rest)
    assert_as_expected(read(state).values["up/kernel"], expected, "up/kernel")


def test_rows_of_dead_units_are_counted():
    """A unit without gradient: a zero row of the polar factor, infinitely smaller than others."""
    grads = {"dense": {"kernel": gaussian(6, 8).at[:, :2].set(0)}}
    tx = recorded(omp.scale_by_muonplus, every=1)()
    values = read(jax.jit(tx.update)(grads, tx.init(grads))[1]).values["dense/kernel"]
    assert values["polar/row_floor_share"] == 0.25
    assert values["polar/col_floor_share"] == 0
    assert values["update/row_ratio"] == np.inf


@pytest.mark.parametrize(
    "options",
    [
        {"consistent_rms": 0.2},
        {"consistent_rms": 0.2, "adaptive": True},
        {"norm": "none", "bias_correction": True, "eps": 1.0},
        {"norm": "none", "adaptive": True, "mu_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_recorded_update_is_the_one_that_is_applied(options):
    """Its root mean square is that of what `scale_by_muonplus` hands on."""
    grads = {"dense": {"kernel": gaussian(6, 8)}}
    tx = recorded(omp.scale_by_muonplus, every=1)(**options)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    given = read(state).values["dense/kernel"]["update/rms"]
    np.testing.assert_allclose(given, rms(updates["dense"]["kernel"]), rtol=1e-5)
