"""`watched`: any transformation's input and output, measured."""

import jax
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.diagnostics import read, watched
from tests.support.measures import SIDES, correlation, distance, gaussian, rms, variance
from tests.support.records import ALL, tree


def test_watched_link_records_its_input_and_output():
    """What goes in and what comes out, and neither is changed."""
    grads = {"dense": {"kernel": gaussian(6, 8)}}
    momentum = omp.momentum(0.5, nesterov=False)
    plain = optax.chain(momentum, omp.orthogonalize(), omp.normalize("row"))
    chain = optax.chain(
        momentum,
        watched(omp.orthogonalize(), every=1, measures=ALL, only="dense"),
        omp.normalize("row"),
    )
    step = jax.jit(lambda tx, g: tx.update(g, tx.init(g)), static_argnums=0)
    (updates, state), (expected, _) = step(chain, grads), step(plain, grads)
    np.testing.assert_array_equal(updates["dense"]["kernel"], expected["dense"]["kernel"])
    values = read(state).values["dense/kernel"]
    before = grads["dense"]["kernel"].T / 2
    after = omp.polar.newton_schulz(before)
    for stage, x in {"before": before, "after": after}.items():
        np.testing.assert_allclose(values[f"{stage}/rms"], rms(x), rtol=1e-4)
        for side in SIDES:
            expected = variance(x, side)
            np.testing.assert_allclose(values[f"{stage}/{side}_variance"], expected, rtol=1e-3)
    assert values["after/row_spearman"] == pytest.approx(correlation(before, after, "row"))
    assert values["after/distance"] == pytest.approx(distance(after, before), rel=1e-4)
    assert np.isnan(values["after/row_floor_share"])


def test_watched_optimizer_records_its_matrices():
    """Leaves that are not matrices are updated, and not recorded; extra arguments pass through."""
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}}
    params = tree(shapes=shapes)
    tx = watched(optax.sgd(0.5), every=1, measures=("row_ratio", "rms"))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params, value=1.0)
    np.testing.assert_array_equal(updates["up"]["bias"], -0.5 * params["up"]["bias"])
    assert list(read(state).values) == ["up/kernel"]
    values = read(state).values["up/kernel"]
    assert values["after/rms"] == values["before/rms"] / 2
    assert values["after/row_ratio"] == pytest.approx(values["before/row_ratio"])


def test_rules_say_which_matrices_are_watched():
    params = tree(shapes={"layers": {"mlp": (2, 4, 6)}, "experts": {"w": (2, 3, 5)}})
    rules = [("experts/", omp.MuonDimensionNumbers(-2, -1))]
    with pytest.raises(ValueError, match="No rule says"):
        watched(optax.sgd(0.1)).init(params)
    tx = watched(optax.sgd(0.1), every=1, rules=rules, layer_axes={"layers": 0})
    _, state = tx.update(params, tx.init(params), params)
    values = read(state).values
    assert {name: x["before/rms"].shape for name, x in values.items()} == {
        "experts/w": (2,),
        "layers/mlp": (2,),
    }
    with pytest.raises(ValueError, match="Got rules next to dimension numbers"):
        watched(optax.sgd(0.1), rules=rules, weight_dimension_numbers=lambda params: None)
