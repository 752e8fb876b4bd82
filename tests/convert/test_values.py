"""Which array of the old state takes each place in the new one."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_muonplus as omp
from tests.support.states import filled
from tests.support.trees import SHAPES, by_path, random_tree

PARAMS = random_tree(SHAPES)
UP_ONLY = {"up": {"kernel": omp.MuonDimensionNumbers(), "bias": None}, "down": None}
DIMS = {"muon_weight_dimension_numbers": UP_ONLY}
FALLING = optax.linear_schedule(0.1, 0.02, 10)


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def injected(maker=omp.muonplus, rate=FALLING, **options):
    return optax.inject_hyperparams(maker)(rate, **options)


def partitioned(first, second):
    return optax.partition({"a": first, "b": second}, {"up": "a", "down": "b"})


def at(tree, path):
    return functools.reduce(dict.get, path.split("/"), tree)


OLD = {
    "adamw": (clipped(optax.adamw(FALLING)), "ScaleByAdamState"),
    "contrib": (optax.contrib.muon(FALLING, **DIMS), "MuonState"),
    "ours": (omp.muon(FALLING, **DIMS), "MomentumState"),
}
WRAPPERS = {
    "MultiSteps(inject)": lambda tx: optax.MultiSteps(injected(lambda learning_rate: tx), 2),
    "chain(clip, MultiSteps)": lambda tx: clipped(
        optax.MultiSteps(tx, 2).gradient_transformation()
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "masked": lambda tx: optax.masked(tx, jax.tree.map(lambda x: True, PARAMS)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("old", OLD)
def test_moments_and_counts_go_into_any_wrapper(old, wrapper):
    tx, average = OLD[old]
    old = filled(tx.init(PARAMS))
    new = WRAPPERS[wrapper](omp.muonplus(FALLING, **DIMS)).init(PARAMS)
    state, _ = omp.take_over(old, new, PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(new)
    momentum = omp.transforms.find_momentum(state).mu
    pairs = [(momentum, optax.tree.get(old, average).mu, "up/kernel")]
    ours, theirs = (optax.tree.get(x, "ScaleByAdamState") for x in (state, old))
    for path in ("up/bias", "down/kernel"):
        pairs += [(ours.mu, theirs.mu, path), (ours.nu, theirs.nu, path)]
    for a, b, path in pairs:
        np.testing.assert_array_equal(at(a, path), at(b, path))
    counts = optax.tree.get_all_with_path(state, "count")
    assert {int(x) for _, x in counts if x is not None} == {7}


MAKERS = {
    "muonplus": omp.muonplus(FALLING, bias_correction=True, mu_dtype="bfloat16"),
    "contrib": optax.contrib.muon(FALLING),
    "adamw": optax.adamw(FALLING),
    "inject": injected(adam_learning_rate=0.1),
    "partition": partitioned(omp.muonplus(FALLING), omp.muon(0.1)),
}
# The rate of a schedule is a record of the last update.
SETTINGS = re.compile(r"ns_coeffs|(^|/)hyperparams/(?!learning_rate)")


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_takes_over_itself(name):
    new = MAKERS[name].init(PARAMS)
    old = filled(new)
    state, report = omp.take_over(old, new, PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(old)
    assert not report.started_anew and not report.not_used
    both = jax.tree.leaves(old), jax.tree.leaves(new)
    for (path, x), before, initial in zip(by_path(state).items(), *both, strict=True):
        expected = initial if SETTINGS.search(path) else before
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x, expected)


def decaying(count):
    return 0.1 / (1 + count)


ACCUMULATED = optax.MultiSteps(optax.adamw(decaying), 3)
COUNTING = {
    "apply_every before": optax.chain(optax.apply_every(4), omp.muonplus(decaying)),
    "apply_every behind": optax.chain(omp.muonplus(decaying), optax.apply_every(4)),
    "MultiSteps": optax.MultiSteps(omp.muonplus(decaying), 3),
    "inject(MultiSteps)": optax.inject_hyperparams(
        lambda learning_rate: optax.MultiSteps(
            omp.muonplus(learning_rate, weight_decay=decaying), 3
        )
    )(0.1),
    "MultiSteps(inject)": optax.MultiSteps(injected(rate=decaying), 3),
    "others in MultiSteps": omp.muonplus(decaying, others=ACCUMULATED),
    "reduce_on_plateau": optax.chain(
        omp.muonplus(decaying), optax.contrib.reduce_on_plateau(accumulation_size=5)
    ),
    "ema": optax.chain(omp.muonplus(decaying), optax.ema(0.9)),
    "noise": optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), omp.muonplus(decaying)),
    "schedule_free": optax.contrib.schedule_free(omp.muonplus(decaying), 0.1),
    "recorded": omp.contrib.recorded(omp.muonplus(decaying), every=2),
    "NorMuon": omp.optimizer(omp.contrib.NorMuon(), decaying),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_run_that_takes_over_itself_has_the_same_state(name):
    """Each count is its own: those of schedules, of accumulation and of wrappers differ."""
    tx = COUNTING[name]
    extra = {"value": jnp.ones([])} if name == "reduce_on_plateau" else {}
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(10):
        _, state = update(PARAMS, state, PARAMS, **extra)
    found, report = omp.take_over(state, tx.init(PARAMS), PARAMS)
    assert not report.started_anew and not report.not_used
    jax.tree.map(np.testing.assert_array_equal, *map(key_data, (found, state)))


def key_data(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def test_counts_go_on_from_the_most_similar_path():
    """In front of an optimizer, or around a part of it, something is new or gone."""
    old = omp.muonplus(decaying, others=ACCUMULATED)
    state, update = old.init(PARAMS), jax.jit(old.update)
    for _ in range(9):
        _, state = update(PARAMS, state, PARAMS)
    for others in (ACCUMULATED, optax.adamw(decaying)):
        new = clipped(omp.muonplus(decaying, others=others)).init(PARAMS)
        found, _ = omp.take_over(state, new, PARAMS)
        rates = optax.tree.get_all_with_path(found, "ScaleByScheduleState")
        counts = {"muon" in jax.tree_util.keystr(path): int(x.count) for path, x in rates}
        assert counts == {True: 9, False: 3}


def counting(tx, params=PARAMS, **numbers):
    """Returns a state with these counts, by a part of their paths, and all others at 7."""

    def number(keys, x):
        path = "_" + jax.tree_util.keystr(keys, simple=True, separator="_")
        return next((jnp.asarray(n) for part, n in numbers.items() if part in path), x)

    return jax.tree.map_with_path(number, filled(tx.init(params)))


OURS = omp.muonplus(FALLING, bias_correction=True)
COUNTS = {
    # AdamW's group or the momentum started anew in the middle of the run, schedules did not.
    "adamw": (optax.adamw(FALLING), {"_0_count": 3}, (3, 7, 7)),
    "earlier schedule": (optax.adamw(FALLING), {"_2_count": 3}, (7, 3, 3)),
    "inject(adamw)": (injected(optax.adamw), {"_0_count": 3}, (3, 7, 7)),
    "momentum": (OURS, {"muon_inner_state_0_0_count": 3}, (7, 3, 7)),
    # A schedule that the old optimizer had not begins at another count of updates.
    "no schedule": (optax.contrib.muon(0.1), {"adam_inner_state_0_count": 3}, (3, 7, 7)),
    "adamw alone": (optax.adamw(0.1), {}, (7, 7, 7)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_adamw_momentum_and_schedules(name):
    tx, numbers, expected = COUNTS[name]
    state, _ = omp.take_over(counting(tx, **numbers), OURS.init(PARAMS), PARAMS)
    rates = optax.tree.get_all_with_path(state, "ScaleByScheduleState")
    counts = [optax.tree.get(state, "ScaleByAdamState").count]
    counts += [omp.transforms.find_momentum(state).count, *(x.count for _, x in rates)]
    assert tuple(map(int, counts)) == (*expected, expected[-1])


def stepped(tx, params, state, seeds):
    update = jax.jit(tx.update)
    for seed in seeds:
        updates, state = update(random_tree(SHAPES, seed), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(("nesterov", "back"), [(True, False), (False, True)])
def test_optax_muon_and_ours_continue_each_other(nesterov, back):
    """The unbroken run is that of the old optimizer."""
    options = {**DIMS, "weight_decay": 0.1, "nesterov": nesterov, "adam_learning_rate": 3e-3}
    as_optax = {"shape_scale": "max", "bias_correction": True, "adam_nesterov": nesterov}
    both = optax.contrib.muon(FALLING, **options), omp.muon(FALLING, **as_optax, **options)
    old, new = both[:: -1 if back else 1]
    params, old_state = stepped(old, PARAMS, old.init(PARAMS), range(6))
    state, report = omp.take_over(old_state, new.init(params), params)
    assert not report.started_anew and not report.not_used
    actual, expected = (
        stepped(*x, range(6, 10))[0] for x in ((new, params, state), (old, params, old_state))
    )
    for x, y, before in zip(*map(jax.tree.leaves, (actual, expected, params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y - before).max(), rtol=0)


def test_a_momentum_that_starts_anew_has_a_count_that_does():
    old = counting(OURS, {"bias": PARAMS["up"]["bias"]})
    state, report = omp.take_over(old, OURS.init(PARAMS["up"]), PARAMS["up"])
    assert omp.transforms.find_momentum(state).count == 0
    assert "kernel: momentum" in report.started_anew


class Means(NamedTuple):
    mu: jax.Array
    nu: jax.Array


MATRIX = jnp.ones((4, 8))
NAMED = [
    {"mu": {"mu": MATRIX, "count": jnp.ones(3)}, "nu": MATRIX},
    {"mu": {"a": MATRIX}, "a": MATRIX},
    Means(MATRIX, MATRIX),
    {"attn": {"query": MATRIX, "value": MATRIX}},
]


@pytest.mark.parametrize("params", NAMED)
def test_parameters_may_have_names_of_fields(params):
    tx = omp.muonplus(FALLING)
    old = filled(tx.init(params))
    state, report = omp.take_over(old, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, state, old)
    assert not report.started_anew
    assert "attn" not in params or "attn/value: momentum" in report.kept


@pytest.mark.parametrize("committed", [False, True])
def test_all_arrays_of_a_state_can_be_donated(committed):
    """JAX refuses to donate one array twice; here all counts come from one."""
    old = filled(optax.adamw(0.1).init(PARAMS))
    here = jax.device_put((old, OURS.init(PARAMS)), jax.devices()[0] if committed else None)
    state, _ = omp.take_over(*here, PARAMS)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)


def test_float16_holds_what_it_can():
    """A number out of its range becomes its largest, not infinity, which would stay."""
    old = optax.tree.set(omp.muon(0.1).init(PARAMS), mu=jax.tree.map(lambda x: x * 0 + 1e9, PARAMS))
    state, _ = omp.take_over(old, omp.muon(0.1, mu_dtype="float16").init(PARAMS), PARAMS)
    assert (omp.transforms.find_momentum(state).mu["up"]["kernel"] == 65504).all()


SIZES = {"up/kernel": ("up", "kernel", (8, 24)), "embed": ("embed", "embedding", (64, 8))}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}, {"bias_correction": True}])
def test_an_array_of_another_shape_starts_anew(name, options):
    """A vocabulary that grew, or a wider layer; the update runs."""
    old = {"embed": {"embedding": jnp.ones((50, 8))}, "up": {"kernel": jnp.ones((8, 16))}}
    module, leaf, shape = SIZES[name]
    params = {**old, module: {leaf: jnp.ones(shape)}}
    tx = omp.muonplus(0.1, **options)
    state, report = omp.take_over(filled_floats(tx.init(old)), tx.init(params), params)
    assert any(x.startswith(f"{module}/{leaf}") for x in report.started_anew)
    assert not any(x.startswith(f"{module}/{leaf}") for x in report.kept)
    tx.update(params, state, params)


def filled_floats(state):
    return jax.tree.map(lambda x: x if x.dtype == jnp.int8 else jnp.ones_like(x), state)
