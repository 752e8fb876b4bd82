"""A run that changes its optimizer goes on as if it had not, or as a formula says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support import flat
from tests.support.states import filled
from tests.support.trees import SHAPES, random_tree

DIMS = {"up": {"kernel": MuonDimensionNumbers(), "bias": None}, "down": MuonDimensionNumbers()}
PARAMS = random_tree(SHAPES)
GRADS = [random_tree(SHAPES, seed) for seed in range(1, 13)]
HALF = len(GRADS) // 2
FALLING = optax.linear_schedule(0.1, 0.02, len(GRADS))


def run(tx, state, grads):
    """Updates of each step, and the state after them. Gradients do not depend on the updates."""
    step = jax.jit(tx.update)
    updates = []
    for g in grads:
        update, state = step(g, state, PARAMS)
        updates.append(update)
    return updates, state


def switched(old, new, params=PARAMS):
    """Updates of ``new`` in the second half of a run that ``old`` began, and the report."""
    _, state = run(old, old.init(params), GRADS[:HALF])
    state, report = omp.take_over(state, new.init(params), params)
    return run(new, state, GRADS[HALF:])[0], report


def unbroken(tx):
    return run(tx, tx.init(PARAMS), GRADS)[0][HALF:]


def assert_same_updates(actual, expected, rtol):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, atol=rtol * np.abs(e).max(), rtol=0)


def pair(nesterov):
    """Optax's Muon and ours with the same update."""
    common = {"muon_weight_dimension_numbers": DIMS, "nesterov": nesterov, "weight_decay": 0.1}
    theirs = optax.contrib.muon(FALLING, **common)
    as_optax = {"shape_scale": "max", "bias_correction": True, "adam_nesterov": nesterov}
    ours = omp.muon(FALLING, **as_optax, **common)
    return theirs, ours


@pytest.mark.parametrize("back", [False, True], ids=["to ours", "and back"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_optax_muon_and_ours_continue_each_other(nesterov, back):
    """The unbroken run is Optax's alone."""
    theirs, ours = pair(nesterov)
    old, new = (ours, theirs) if back else (theirs, ours)
    actual, report = switched(old, new)
    expected = unbroken(theirs)
    assert_same_updates(actual, expected, 1e-5)
    assert not report.started_anew and not report.not_used


MAKERS = {
    "muonplus": lambda: omp.muonplus(FALLING, bias_correction=True, mu_dtype="bfloat16"),
    "muon": lambda: omp.muon(0.1),
    "normuon": lambda: flat.normuon(FALLING),
    "adamuon": lambda: flat.adamuon(0.1),
    "aurora": lambda: flat.aurora(0.1),
    "hyperball": lambda: flat.hyperball(FALLING),
    "mano": lambda: flat.mano(0.1),
    "muown": lambda: flat.muown(FALLING, weight_decay=FALLING),
    "contrib": lambda: optax.contrib.muon(FALLING),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(FALLING)),
    "inject": lambda: optax.inject_hyperparams(omp.muonplus)(FALLING, adam_learning_rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(omp.muonplus(FALLING), 3),
    "apply_if_finite": lambda: optax.apply_if_finite(omp.muonplus(0.1), 3),
    "lookahead": lambda: Fast(optax.lookahead(omp.muonplus(FALLING), 3, 0.5)),
    "schedule_free": lambda: optax.contrib.schedule_free(omp.muonplus(0.1, beta=0.0), 0.1),
    "plateau": lambda: optax.chain(omp.muonplus(0.1), optax.contrib.reduce_on_plateau()),
    "partition": lambda: optax.partition(
        {"a": omp.muonplus(FALLING), "b": omp.muon(0.1)}, {"up": "a", "down": "b"}
    ),
}


class Fast:
    """A transformation of fast and slow parameters, made of one set of them."""

    def __init__(self, tx):
        self.init = lambda params: tx.init(optax.LookaheadParams.init_synced(params))


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_takes_over_all_of_its_own_state(name):
    init = MAKERS[name]().init
    old = filled(init(PARAMS))
    if name == "MultiSteps":
        old = old._replace(mini_step=jnp.asarray(0))
    state, report = omp.take_over(old, init(PARAMS), PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(old)
    assert not report.started_anew and not report.not_used
    arrays = zip(*(jax.tree.leaves_with_path(x) for x in (state, old, init(PARAMS))), strict=True)
    for (path, x), (_, before), (_, initial) in arrays:
        setting = re.search(r"\.hyperparams\[|ns_coeffs", jax.tree_util.keystr(path))
        expected = initial if setting else before
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("schedule", [3, 7])
def test_a_schedule_goes_on_by_its_own_count_where_adamw_has_another(schedule):
    """AdamW's group may have started anew in the middle of a run; its moments keep their count."""
    adamw, scale, rate = optax.adamw(FALLING).init(PARAMS)
    old = filled(adamw), scale, rate._replace(count=jnp.asarray(schedule))
    new = omp.muonplus(FALLING, bias_correction=True)
    state, _ = omp.take_over(old, new.init(PARAMS), PARAMS)
    assert optax.tree.get(state, "ScaleByAdamState").count == 7
    assert omp.transforms.find_momentum(state).count == schedule
    rates = optax.tree.get_all_with_path(state, "ScaleByScheduleState")
    assert [int(x.count) for _, x in rates] == [schedule, schedule]
    injected = optax.inject_hyperparams(omp.muonplus)(FALLING).init(PARAMS)
    assert omp.take_over(old, injected, PARAMS)[0].count == schedule


def test_two_groups_of_adamw_have_counts_of_their_own():
    """Each keeps it; one group that has the moments of both would need them to agree."""
    labels = {"up": "a", "down": "b"}
    init = optax.partition({"a": optax.adamw(0.1), "b": optax.adamw(0.1)}, labels).init
    old = init(PARAMS)
    old.inner_states["b"] = optax.tree.set(old.inner_states["b"], count=jnp.asarray(5))
    state, _ = omp.take_over(old, init(PARAMS), PARAMS)
    assert [int(optax.tree.get(state.inner_states[x], "count")) for x in "ab"] == [0, 5]
    message = "Counts of the old state differ.* of 0/count .*a/.*is 0, .*b/.*is 5.* same number"
    with pytest.raises(ValueError, match=message):
        omp.take_over(old, optax.adamw(0.1).init(PARAMS), PARAMS)


def test_what_has_the_same_name_only_starts_anew():
    """The mean of squares of another rule, and a count that is not one of updates."""
    rest = optax.contrib.reduce_on_plateau()
    new = optax.chain(omp.baselines.adamuon(0.1), rest).init(PARAMS)
    old = filled(
        optax.chain(omp.baselines.normuon(0.1), optax.scale_by_schedule(FALLING)).init(PARAMS)
    )
    state, report = omp.take_over(old, new, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state[1], rest.init(PARAMS))
    assert not np.any(optax.tree.get(state[0], "AdaMuonState").nu["up"]["kernel"])
    assert "up/kernel: running mean of squares" in report.started_anew
    assert "up/kernel: momentum" in report.kept


def test_inject_hyperparams_around_multi_steps_counts_batches():
    """Its schedules go on by them, and those inside by complete steps."""

    def accumulating(learning_rate, inside):
        inner = optax.chain(omp.muonplus(learning_rate), optax.scale_by_schedule(inside))
        return optax.MultiSteps(inner, 2).gradient_transformation()

    tx = optax.inject_hyperparams(accumulating, static_args="inside")(FALLING, inside=FALLING)
    _, old = run(tx, tx.init(PARAMS), GRADS[:4])
    state, report = omp.take_over(old, tx.init(PARAMS), PARAMS)
    assert state.count == 4 and state.hyperparams_states["learning_rate"].count == 4
    assert state.inner_state.gradient_step == 2 and not report.started_anew
    state, _ = omp.take_over(old, omp.muonplus(FALLING).init(PARAMS), PARAMS)
    assert {int(x) for _, x in optax.tree.get_all_with_path(state, "count") if x is not None} == {2}


def test_gradients_of_half_a_step_under_jit():
    """How many there are is not known there: they are kept as they are, or refused."""
    tx = optax.MultiSteps(omp.muonplus(0.1), 2)
    _, old = run(tx, tx.init(PARAMS), GRADS[:1])
    switch = jax.jit(lambda old, new: omp.take_over(old, new, PARAMS)[0])
    state = switch(old, tx.init(PARAMS))
    assert state.mini_step == 1
    jax.tree.map(np.testing.assert_array_equal, state.acc_grads, old.acc_grads)
    with pytest.raises(ValueError, match=r"mini_step .* is not known here: .* outside of jax"):
        switch(old, omp.muonplus(0.1).init(PARAMS))


def test_a_recorder_counts_on_and_forgets_its_record():
    tx = omp.diagnostics.recorded(omp.muonplus, every=2)(0.1)
    init = tx.init(PARAMS)
    state, report = omp.take_over(filled(init), init, PARAMS)
    assert state.count == 7 and state.step == -1
    assert bytes(state.names) == bytes(init.names)
    assert not report.started_anew


def average(grads, decay, start=0.0):
    m = np.asarray(start, np.float64)
    for g in grads:
        m = decay * m + (1 - decay) * np.asarray(g, np.float64)
    return m


@pytest.mark.parametrize("old", ["adamw", "contrib", "muonplus", "normuon"])
def test_momentum_is_the_average_that_it_was(old):
    """By its formula: the old decay before, the new one after."""
    makers = {
        "adamw": lambda: optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(0.1, b1=0.9)),
        "contrib": lambda: optax.contrib.muon(0.1, beta=0.9),
        "muonplus": lambda: omp.muonplus(0.1, beta=0.9),
        "normuon": lambda: flat.normuon(0.1, beta=0.9),
    }
    new = omp.muonplus(0.1, beta=0.95, polar="svd")
    _, state = run(makers[old](), makers[old]().init(PARAMS), GRADS[:HALF])
    state, _ = omp.take_over(state, new.init(PARAMS), PARAMS)
    _, state = run(new, state, GRADS[HALF:])
    for name in ("up", "down"):
        kernels = [g[name]["kernel"] for g in GRADS]
        expected = average(kernels[HALF:], 0.95, average(kernels[:HALF], 0.9))
        actual = omp.transforms.find_momentum(state).mu[name]["kernel"]
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_the_other_group_goes_on_as_adamw_alone():
    """Bias correction included; to rounding, since it is compiled with something else."""
    adamw = optax.adamw(FALLING, weight_decay=0.1)
    new = omp.muonplus(0.1, adam_learning_rate=FALLING, adam_weight_decay=0.1)
    actual, report = switched(adamw, new)
    for a, e in zip(actual, unbroken(adamw), strict=True):
        np.testing.assert_allclose(a["up"]["bias"], e["up"]["bias"], rtol=1e-5)
    assert report.not_used == ("down/kernel: second moment", "up/kernel: second moment")


@pytest.mark.parametrize("old", [optax.contrib.muon(0.1), optax.adamw(0.1), omp.muonplus(0.1)])
def test_a_schedule_begins_where_the_run_is(old):
    """Also if the old optimizer had none."""
    new = functools.partial(omp.muon, polar="svd", adam_learning_rate=1.0)
    actual, _ = switched(old, new(FALLING))
    size = [np.linalg.norm(u["down"]["kernel"]) for u in actual]
    steady = [np.linalg.norm(u["down"]["kernel"]) for u in switched(old, new(1.0))[0]]
    rates = 0.1 - 0.08 * np.arange(HALF, len(GRADS)) / len(GRADS)
    np.testing.assert_allclose(size, rates * steady, rtol=1e-5)
