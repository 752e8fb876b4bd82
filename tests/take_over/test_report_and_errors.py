"""What take_over says: the report, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_muonplus as omp
from tests.support.states import filled
from tests.support.trees import SHAPES, random_tree

PARAMS = random_tree(SHAPES)
LAYERS = {
    "layers": [{"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)} for _ in range(3)],
    "head": {"kernel": jnp.ones((8, 4))},
}
FALLING = optax.linear_schedule(0.1, 0.02, 10)

FROM_ADAMW = """\
name                             state                    outcome   from, or why
inner_states/adam/inner_state/0  AdamW's count            kept      at 7
head/kernel                      first and second moment  kept      0
layers/{0..2}/bias               first and second moment  kept      0
inner_states/adam/inner_state/2  count                    kept      at 7
layers/{0..2}/kernel             momentum   kept      0, AdamW's first moment, float32 to bfloat16
inner_states/muon/inner_state/2  count                    kept      at 7
layers/{0..2}/kernel             second moment            not used  no place in the new state
Learning rates and other settings are those of the new optimizer."""


def taken_over(old, new, params=PARAMS):
    return omp.take_over(filled(old.init(params)), new.init(params), params)


def test_report_of_adamw_to_ours():
    tx = omp.muonplus(FALLING, mu_dtype="bfloat16")
    _, report = taken_over(optax.adamw(FALLING), tx, LAYERS)
    header, line, *rows = str(report).splitlines()
    assert set(line) == {"-"}
    expected = [row.split() for row in FROM_ADAMW.splitlines()]
    assert [row.split() for row in (header, *rows)] == expected
    assert len(report.kept) == 1 + 2 * 4 + 1 + 3 + 1
    assert report.started_anew == ()
    assert report.not_used == tuple(f"layers/{i}/kernel: second moment" for i in range(3))


def test_a_group_of_adamw_without_a_second_moment_starts_anew():
    """Optax's Muon takes a head for a matrix; its momentum alone would be divided by epsilon."""
    state, report = taken_over(optax.contrib.muon(0.1), omp.muonplus(FALLING), LAYERS)
    assert not any(np.any(x) for x in jax.tree.leaves(optax.tree.get(state, "ScaleByAdamState")))
    (why,) = {entry.note for entry in report.entries if entry.outcome == "started anew"}
    assert why == "no second moment of head/kernel; the group has one count"
    tables = {name: {"embedding": jnp.ones((4, 8))} for name in "abc"}
    _, of_three = taken_over(optax.contrib.muon(0.1), omp.muonplus(0.1), {**LAYERS, **tables})
    notes = [entry.note for entry in of_three.entries if entry.outcome == "started anew"]
    assert notes[0].startswith("no second moment of a/embedding, b/embedding, ...; the group")
    assert "layers/0/bias: first moment" in report.started_anew
    assert "head/kernel: momentum" in report.not_used
    rates = optax.tree.get_all_with_path(state, "ScaleByScheduleState")
    assert [int(x.count) for _, x in rates] == [7, 7]
    state, report = taken_over(omp.muonplus(FALLING), optax.adamw(FALLING))
    assert not any(np.any(x) for x in jax.tree.leaves(state[0]))
    assert report.kept == ("2: count",) and state[2].count == 7


def test_a_new_parameter_starts_anew():
    old = filled(omp.muon(0.1, bias_correction=True).init(PARAMS))
    params = {**PARAMS, "more": {"kernel": jnp.ones((8, 8))}}
    state, report = omp.take_over(old, omp.muon(0.1, bias_correction=True).init(params), params)
    assert report.started_anew == ("more/kernel: momentum",)
    kept = omp.transforms.find_momentum(state)
    assert not np.any(kept.mu["more"]["kernel"]) and np.all(kept.mu["up"]["kernel"])
    assert kept.count == 7


def gone():
    state = filled(optax.adamw(0.1).init(PARAMS))
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    return state


def counts_that_differ():
    state = filled(omp.muonplus(FALLING).init(PARAMS))
    state.inner_states["adam"] = optax.tree.set(state.inner_states["adam"], count=jnp.asarray(3))
    return state.inner_states


def accumulated():
    tx = optax.MultiSteps(ADAMW, 2)
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[1]


ADAMW = optax.adamw(FALLING)
REFUSED = {
    "sgd": (lambda: optax.sgd(0.1, 0.9).init(PARAMS), "Got a tuple as old_state.*0/trace/down"),
    "adagrad": (lambda: optax.adagrad(0.1).init(PARAMS), "no momentum.*sum_of_squares.*Known"),
    "adabelief": (lambda: optax.adabelief(0.1).init(PARAMS), "ScaleByBeliefState, which may not"),
    "parameters": (lambda: PARAMS, "Got a dict as old_state, in which no momentum of these"),
    "nothing": (lambda: (), "found. It has no arrays; params"),
    "other parameters": (
        lambda: ADAMW.init({"params": PARAMS}),
        "found. It has .*, 0/mu/params/down/kernel.*params are down/kernel.*Pass the param",
    ),
    "other shapes": (
        lambda: ADAMW.init(jax.tree.map(lambda x: x[1:], PARAMS)),
        r"0/mu/up/bias of old_state does not fit: it is float32\[11\], and float32\[12\] in the",
    ),
    "complex": (
        lambda: ADAMW.init(jax.tree.map(lambda x: x + 0j, PARAMS)),
        r"mu/up/bias .* is complex64\[12\], and float32\[12\] in the new state",
    ),
    "two": (
        lambda: (ADAMW.init(PARAMS), ADAMW.init(PARAMS)),
        "several arrays that are the first moment of up/bias: 0/0/mu/up/bias, 1/0/mu/up/bias",
    ),
    "counts": (counts_that_differ, "that of 1/count .*adam/.*count is 3, muon/.*count is 7. Pass"),
    "half a step": (accumulated, "mini_step of old_state must be 0, but is 1: MultiSteps holds"),
    "donated": (gone, "these are shapes or were donated: .*0/mu/down/kernel"),
    "shapes": (lambda: jax.eval_shape(ADAMW.init, PARAMS), "old_state must have arrays.* shapes "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_was_given(name):
    old, message = REFUSED[name]
    new = optax.chain(omp.muonplus(0.1), optax.scale_by_schedule(FALLING))
    with pytest.raises(ValueError, match=message):
        omp.take_over(old(), new.init(PARAMS), PARAMS)


def test_a_new_state_must_have_arrays_and_a_momentum():
    old = ADAMW.init(PARAMS)
    with pytest.raises(ValueError, match=r"new_state must have arrays.*pass tx.init\(params\)"):
        omp.take_over(old, jax.eval_shape(omp.muonplus(0.1).init, PARAMS), PARAMS)
    with pytest.raises(ValueError, match="as new_state, in which no momentum"):
        omp.take_over(old, optax.sgd(0.1).init(PARAMS), PARAMS)


def test_gradients_of_half_a_step_under_jit():
    """How many there are is not known there: they are kept as they are, or refused."""
    old = accumulated()
    switch = jax.jit(lambda old, new: omp.take_over(old, new, PARAMS)[0])
    state = switch(old, optax.MultiSteps(omp.muonplus(0.1), 2).init(PARAMS))
    assert state.mini_step == 1
    jax.tree.map(np.testing.assert_array_equal, state.acc_grads, old.acc_grads)
    with pytest.raises(ValueError, match=r"mini_step .* is not known here: .* outside of jax"):
        switch(old, omp.muonplus(0.1).init(PARAMS))
