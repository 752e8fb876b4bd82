"""The recorder's state: its begin, under vmap and injection, in NNX and JSON; and `watched`.

Checkpoints, donation and scan are in `optimizers/test_state.py`, with those of other states.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_muonplus as omp
from optax_muonplus.diagnostics import read, recorded, watched
from tests.support.measures import SIDES, correlation, distance, gaussian, rms, variance
from tests.support.records import (
    ALL,
    DIMS,
    FEW,
    assert_records_close,
    run,
    tree,
)


@pytest.fixture
def small():
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}, "up2": {"kernel": (6, 8)}}
    tx = recorded(omp.muonplus, every=2, measures=FEW)(0.1)
    return tx, lambda seed: tree(seed, shapes=shapes)


def test_recording_can_begin_and_end_in_the_middle(small):
    tx, make = small
    params, plain = make(0), omp.muonplus(0.1)
    update = jax.jit(plain.update)
    _, before = update(make(1), plain.init(params), params)
    with pytest.raises(ValueError, match=r"tx.init\(params\)._replace\(inner=state\)"):
        tx.update(make(2), before, params)
    _, state = jax.jit(tx.update)(make(2), tx.init(params)._replace(inner=before), params)
    _, expected = update(make(2), before, params)
    jax.tree.map(np.testing.assert_array_equal, state.inner, expected)


def test_only_the_inner_state_is_mapped_as_parameters_are(small):
    """By optax.tree.map_params, with which trainers place a state on a mesh."""
    tx, make = small
    state = tx.init(make(0))
    marked = optax.tree.map_params(
        tx, lambda x: "as a parameter", state, transform_non_params=lambda x: "elsewhere"
    )
    assert set(jax.tree.leaves(marked._replace(inner=None))) == {"elsewhere"}
    assert jax.tree.leaves(marked.inner).count("as a parameter") == 4


def test_hyperparameters_can_be_injected(small):
    _, make = small
    made = optax.inject_hyperparams(recorded(omp.muonplus, every=1, measures=FEW))
    options = {"norm_eps": 1e-8, "nesterov": False}
    tx = optax.chain(optax.clip_by_global_norm(1.0), made(learning_rate=0.1, **options))
    params = make(0)
    clip, state = jax.jit(tx.init)(params)

    update = jax.jit(tx.update)

    def recorded_with(**numbers):
        new = {k: jnp.asarray(v, state.hyperparams[k].dtype) for k, v in numbers.items()}
        changed = (clip, state._replace(hyperparams={**state.hyperparams, **new}))
        return read(update(params, changed, params)[1]).values["up/kernel"]

    plain, slower = recorded_with(), recorded_with(beta=0.975)
    np.testing.assert_allclose(slower["momentum/rms"], plain["momentum/rms"] / 2, rtol=1e-5)
    assert plain["polar/row_floor_share"] == 0
    assert recorded_with(norm_eps=9.0)["polar/row_floor_share"] == 1


def test_ensembles_under_vmap(small):
    tx, make = small
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[make(seed) for seed in range(3)])
    step = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, g)[1]))
    state = step(stacked, step(stacked, jax.vmap(tx.init)(stacked)))
    with pytest.raises(ValueError, match=r"states of 3 optimizers under jax.vmap"):
        read(state)
    alone, update = tx.init(make(2)), jax.jit(tx.update)
    for _ in range(2):
        _, alone = update(make(2), alone, make(2))
    assert_records_close(read(jax.tree.map(lambda x: x[2], state)), read(alone))


def test_nnx_optimizer_records():
    """Its trees are of variables at init, and of plain arrays at update."""
    model = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    made = recorded(omp.muonplus, every=1, only="kernel", measures=FEW)(0.1)
    optimizer = nnx.Optimizer(model, made, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: jnp.sum(m(jnp.ones((2, 6))) ** 2))(model))

    step(model, optimizer)
    record = read(nnx.as_pure(optimizer.opt_state))
    assert record.step == 1 and list(record.values) == ["kernel"]


def test_a_record_is_a_line_of_json():
    made = recorded(omp.muon, every=2, measures=FEW)
    _, state = run(made(0.1, muon_weight_dimension_numbers=DIMS))
    line = json.loads(json.dumps(read(state).as_json(), allow_nan=False))
    values = read(state).values
    assert line["step"] == 2 and line["values"].keys() == values.keys()
    assert line["values"]["up/kernel"]["polar/rms"] == values["up/kernel"]["polar/rms"]
    assert line["values"]["up/kernel"]["polar/row_floor_share"] is None
    experts = line["values"]["experts/kernel"]["polar/rms"]
    np.testing.assert_array_equal(experts, values["experts/kernel"]["polar/rms"])


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
    after = omp.polar.polar_factor(before)
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
