"""The baselines against float64 transcriptions of their published code."""

import functools

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.baselines import NorMuon
from optax_muonplus.baselines._muown import MuownState
from tests.support import flat, reference_baselines
from tests.support.baselines import NAMES, SHAPES, build, decay, run, trees


def oracle_state(name, w):
    zeros = np.zeros(w.shape)
    return {
        "normuon": (zeros, np.zeros((w.shape[0], 1))),
        "adamuon": (zeros, zeros),
        "mano": (zeros, 0),
        "turbo_muon": zeros,
        "hyperball": zeros,
        "muown": None,
    }[name]


def oracle(name, w, grads, **options):
    """The matrix (out, in) after each step."""
    step = functools.partial(getattr(reference_baselines, f"{name}_step"), **options)
    w, state, seen = w.astype(float), oracle_state(name, w), []
    for g in grads:
        update, state = step(w, state, g.astype(float))
        w = w + update
        seen.append(w)
    return seen


VARIANTS = [
    ("normuon", {}),
    ("normuon", {"rule": "paper", "nesterov": False, "beta2": 0.5}),
    ("adamuon", {}),
    ("adamuon", {"sign": False, "beta2": 0.99, "nesterov": False}),
    ("turbo_muon", {}),
    ("turbo_muon", {"nesterov": False, "beta": 0.5}),
    ("mano", {}),
    ("mano", {"nesterov": True, "beta": 0.8}),
    ("hyperball", {}),
    ("hyperball", {"nesterov": False, "beta": 0.5}),
    ("muown", {}),
    ("muown", {"nesterov": False, "beta": 0.5}),
]


def assert_match(name, params, grads, **options):
    """Parameters after each step are those of the published code."""
    seen, _ = run(build(name, **options), params, grads)
    for key in SHAPES:
        turned = [g[key].T for g in grads]
        expected = oracle(name, params[key].T, turned, learning_rate=0.05, **options)
        for ours, theirs, before in zip(
            seen, expected, [params[key].T, *expected[:-1]], strict=True
        ):
            # Of all that has been added so far; the parameters alone would hide the updates.
            moved = np.linalg.norm(theirs - params[key].T)
            assert np.linalg.norm(ours[key].T - theirs) <= 1e-5 * moved, key
            assert np.linalg.norm(theirs - before) > 0


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_parameters_match_the_published_code(name, options, weight_decay):
    assert_match(name, *trees(), **decay(name, weight_decay), **options)


@pytest.mark.parametrize("nesterov", [False, True])
def test_mano_guards_gradients_of_the_size_of_eps(nesterov):
    """Its eps is compared with the sum of gradients, not with their mean."""
    params, grads = trees()
    tiny = [{key: np.float32(1e-9) * x for key, x in g.items()} for g in grads]
    zeros = jax.tree.map(np.zeros_like, params)  # where steps of this size can be seen
    assert_match("mano", zeros, tiny, nesterov=nesterov)


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_normuon_lifts_a_row_that_dies(rule):
    """Its eps guards the root: beneath it, it would leave a row this small as it is."""
    params, grads = trees()
    for g in grads:
        for x in g.values():
            x[:, 0] *= 1e-6
    assert_match("normuon", params, grads, rule=rule)


def test_hyperball_keeps_the_norm_of_each_matrix_and_of_each_step():
    """Around any rule, whose size has no effect; and a rate of zero changes nothing."""
    params, grads = trees()
    small = omp.matrix_chain(NorMuon(), lambda x: 1e-20 * x)
    for rate, link in ((0.3, NorMuon()), (0.3, small), (0.0, NorMuon())):
        tx = omp.baselines.hyperball(rate, link)
        (first, *_, last), _ = run(tx, params, grads)
        for key, w in params.items():
            norm = np.linalg.norm(w)
            assert np.linalg.norm(last[key]) == pytest.approx(norm, rel=1e-6)
            # Of a U across W, the chord of an angle whose tangent is the rate: 0.290 R.
            moved = np.linalg.norm(first[key] - w) / norm
            assert moved == pytest.approx(rate, rel=0.1)
    both = (omp.baselines.hyperball(0.3, link) for link in (NorMuon(), small))
    one, other = (run(tx, params, grads)[0] for tx in both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)


@pytest.mark.parametrize("traced", [False, True])
def test_hyperball_refuses_matrices_of_zeros_that_it_sees(traced):
    params = {"up": np.ones((2, 4, 6), np.float32) * np.array([1, 0], np.float32)[:, None, None]}
    dims = {"up": omp.MuonDimensionNumbers(1, 2)}
    init = build("hyperball", muon_weight_dimension_numbers=dims).init
    if traced:
        jax.jit(init)(params)
    else:
        with pytest.raises(ValueError, match=r"up has a matrix of zeros.*random initial values"):
            init(params)


def test_muown_holds_sizes_and_directions_of_rows():
    """A size that Adam takes through zero turns its row around, and a row of zeros moves."""
    params, grads = trees()
    params["tall"][:, 0], params["tall"][:, 1] = 0, 1e-4 * params["tall"][:, 1]
    seen, state = run(build("muown"), params, grads)
    (muown,) = (s for s in jax.tree.leaves(state, is_leaf=is_muown) if is_muown(s))
    for key in SHAPES:
        norms = np.linalg.norm(seen[-1][key], axis=0)
        np.testing.assert_allclose(np.abs(muown.magnitude[key][0]), norms, rtol=1e-5)
    assert muown.magnitude["tall"][0, 1] < 0
    assert np.linalg.norm(seen[-1]["tall"][:, 0]) > 0.01


def test_muown_goes_on_from_sizes_of_zero():
    params, grads = trees()
    tx = build("muown", 0.5, weight_decay=2.0)  # the first step takes all of it
    seen, _ = run(tx, params, [jax.tree.map(np.zeros_like, params), *grads])
    assert all(np.abs(x).max() < 1e-11 for x in jax.tree.leaves(seen[0]))
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(seen[-1]))


def is_muown(x):
    return isinstance(x, MuownState)


def test_muonplus_row_is_normuon_without_memory():
    params, grads = trees()
    rule = {"beta2": 0.0, "shape_scale": "none", "nu_eps": 0.0}
    normuon = flat.scale_by_normuon(**rule)
    plus = flat.scale_by_muonplus(norm="row", norm_eps=0.0, shape_scale="none", nesterov=True)
    polar = flat.scale_by_muonplus(norm="none", shape_scale="none", nesterov=True)
    ours, theirs, factor = (
        tx.update(grads[0], tx.init(params))[0] for tx in (normuon, plus, polar)
    )
    for key, (_, m) in SHAPES.items():
        scalar = np.linalg.norm(factor[key]) / np.sqrt(m)  # ||O||_F / sqrt(m)
        np.testing.assert_allclose(ours[key], scalar * theirs[key], rtol=2e-5, atol=1e-7)


def test_root_mean_square_of_updates():
    params, grads = trees()
    for tx in (flat.scale_by_adamuon(), flat.scale_by_normuon(rule="paper")):
        updates, _ = tx.update(grads[0], tx.init(params), params)
        for x in updates.values():
            assert np.sqrt(np.mean(np.square(x))) == pytest.approx(0.2, rel=1e-5)
    tx = flat.scale_by_mano()
    updates, _ = tx.update(grads[0], tx.init(params), params)
    for key, x in updates.items():  # columns of W are rows here
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(x), axis=1)), 0.2, rtol=1e-5)
        inner = np.sum(x * params[key], axis=1) / np.linalg.norm(params[key], axis=1)
        assert np.abs(inner).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_change_nothing_and_later_steps_are_finite(name):
    params, grads = trees()
    zeros = jax.tree.map(np.zeros_like, params)
    (first, *_), _ = run(build(name), params, [zeros])
    rounding = 3e-7 if name == "muown" else 0  # it makes parameters anew, of two factors
    for key in params:
        np.testing.assert_allclose(first[key], params[key], rtol=rounding)
    # And a first real step after it is finite; so is one from parameters that are zero.
    for start in (params, zeros) if name != "hyperball" else (params,):
        after, _ = run(build(name), start, [zeros, grads[0], zeros])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize("name", NAMES)
def test_scaling_the_gradient_does_not_change_the_steps(name):
    params, grads = trees()
    usual, _ = run(build(name), params, grads)
    sizes = {"mano": (1e-5, 1e5), "muown": (1e2, 1e15)}  # eps of Mano and of Adam
    for size in sizes.get(name, (1e-15, 1e15)):
        sized = [{key: np.float32(size) * x for key, x in g.items()} for g in grads]
        scaled, _ = run(build(name), params, sized)
        for key in params:
            np.testing.assert_allclose(scaled[-1][key], usual[-1][key], atol=2e-5)
