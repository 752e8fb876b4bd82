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
kept: head/kernel: first moment, layers/{0..2}/bias: first moment, head/kernel: second moment, \
layers/{0..2}/bias: second moment, layers/{0..2}/kernel: momentum
started anew: nothing
not used: layers/{0..2}/kernel: second moment"""


def taken_over(old, new, params=PARAMS):
    return omp.take_over(filled(old.init(params)), new.init(params), params)


def test_report_of_adamw_to_ours():
    tx = omp.muonplus(FALLING, mu_dtype="bfloat16")
    _, report = taken_over(optax.adamw(FALLING), tx, LAYERS)
    assert str(report) == FROM_ADAMW
    assert report.not_used == tuple(f"layers/{i}/kernel: second moment" for i in range(3))


def test_a_group_of_adamw_without_a_second_moment_starts_anew():
    """Optax's Muon takes a head for a matrix; its momentum alone would be divided by epsilon."""
    state, report = taken_over(optax.contrib.muon(0.1), omp.muonplus(FALLING), LAYERS)
    assert not any(np.any(x) for x in jax.tree.leaves(optax.tree.get(state, "ScaleByAdamState")))
    assert "layers/0/bias: first moment" in report.started_anew
    assert "head/kernel: momentum" in report.not_used


def test_a_new_parameter_starts_anew():
    old = filled(omp.muon(0.1, bias_correction=True).init(PARAMS))
    params = {**PARAMS, "more": {"kernel": jnp.ones((8, 8))}}
    state, report = omp.take_over(old, omp.muon(0.1, bias_correction=True).init(params), params)
    assert report.started_anew == ("more/kernel: momentum",)
    kept = omp.transforms.find_momentum(state)
    assert not np.any(kept.mu["more"]["kernel"]) and np.all(kept.mu["up"]["kernel"])
    assert kept.count == 7


ADAMW = optax.adamw(FALLING)
REFUSED = {
    "sgd": (lambda: optax.sgd(0.1, 0.9).init(PARAMS), "Got a tuple as old_state, in which no mom"),
    "adabelief": (lambda: optax.adabelief(0.1).init(PARAMS), "no momentum.*Known are the states"),
    "other parameters": (lambda: ADAMW.init({"params": PARAMS}), "no momentum of these parameters"),
    "two": (
        lambda: (ADAMW.init(PARAMS), ADAMW.init(PARAMS)),
        "several arrays that are the first moment of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_was_given(name):
    old, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        omp.take_over(old(), omp.muonplus(0.1).init(PARAMS), PARAMS)


TX = omp.muonplus(0.1)
NO_STATES = {
    "the optimizer": lambda: TX,
    "its function": lambda: TX.init,
    "shapes": lambda: jax.eval_shape(TX.init, PARAMS),
    "parameters": lambda: PARAMS,
}


@pytest.mark.parametrize("name", NO_STATES)
def test_the_new_state_has_arrays(name):
    wrong, state = NO_STATES[name](), TX.init(PARAMS)
    with pytest.raises(ValueError, match=r"as new_state, in which .*Pass tx\.init\(params\)"):
        omp.take_over(state, wrong, PARAMS)
    with pytest.raises(ValueError, match="as old_state, in which no momentum"):
        omp.take_over(wrong, state, PARAMS)


ACCUMULATING = {
    "MultiSteps": (optax.MultiSteps(TX, 3), "mini_step of old_state is 2"),
    "apply_every": (optax.chain(optax.apply_every(4), TX), "0/count of old_state is 2"),
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_a_step_that_is_not_complete_is_kept_or_refused(name):
    tx, message = ACCUMULATING[name]
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(PARAMS, state, PARAMS)
    taken, _ = omp.take_over(state, tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, taken, state)
    wider = {**PARAMS, "up": {"kernel": jnp.ones((8, 24)), "bias": jnp.ones(24)}}
    for new, params in ((TX, PARAMS), (tx, wider)):
        with pytest.raises(ValueError, match=message):
            omp.take_over(state, new.init(params), params)


def test_counts_that_differ_are_refused_where_each_could_be_meant():
    counts = {x: optax.ScaleByScheduleState(jnp.asarray(n)) for x, n in (("a", 3), ("b", 9))}
    state = {"adam": optax.scale_by_adam().init(PARAMS), **counts}
    with pytest.raises(ValueError, match=r"Counts of .* differ.* a/count is 3, b/count"):
        omp.take_over(state, omp.muonplus(FALLING).init(PARAMS), PARAMS)


def test_other_arrays_are_reported():
    tx = optax.chain(TX, optax.ema(0.9))
    _, report = omp.take_over(tx.init(PARAMS), tx.init(PARAMS), PARAMS)
    assert "1/ema/up/kernel: EmaState" in report.kept
    _, report = omp.take_over(TX.init(PARAMS), tx.init(PARAMS), PARAMS)
    assert "1/ema/up/kernel: EmaState" in report.started_anew
    _, report = omp.take_over(tx.init(PARAMS), TX.init(PARAMS), PARAMS)
    assert "1/ema/up/kernel: EmaState" in report.not_used
