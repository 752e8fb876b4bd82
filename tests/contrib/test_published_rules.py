"""The rivals against float64 transcriptions of their published code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import contrib
from tests.support import reference_contrib
from tests.support.contrib import NAMES, SHAPES, build, decay, run, trees
from tests.support.platforms import LESS_EXACT


def oracle_state(name, w):
    zeros = np.zeros(w.shape)
    return {
        "normuon": (zeros, 0.0),
        "adamuon": (zeros, zeros),
        "mano": (zeros, 0),
    }.get(name, zeros)


def oracle(name, w, grads, **options):
    """The matrix (out, in) after each step."""
    step = functools.partial(getattr(reference_contrib, f"{name}_step"), **options)
    w, state, seen = w.astype(float), oracle_state(name, w), []
    for g in grads:
        update, state = step(w, state, g.astype(float))
        w = w + update
        seen.append(w)
    return seen


VARIANTS = [
    ("normuon", {}),
    ("normuon", {"rule": "paper", "nesterov": False, "beta2": 0.5}),
    ("normuon", {"side": "long"}),
    ("normuon", {"side": "long_row", "rule": "paper", "beta2": 0.5}),
    ("adamuon", {}),
    ("adamuon", {"sign": False, "beta2": 0.99, "nesterov": False}),
    ("aurora", {}),
    ("aurora", {"rounds": 3, "damping": 0.25, "nesterov": False}),
    ("aurora", {"rounds": 1, "norm_eps": 1.0, "ns_coeffs": "jordan", "ns_steps": 5}),
    ("muoneq", {}),
    ("muoneq", {"sides": "col", "nesterov": False}),
    ("muoneq", {"sides": "both", "norm_eps": 1.0}),
    ("turbo_muon", {}),
    ("turbo_muon", {"nesterov": False, "beta": 0.5}),
    ("mano", {}),
    ("mano", {"nesterov": True, "beta": 0.8}),
    ("hyperball", {}),
    ("hyperball", {"nesterov": False, "beta": 0.5}),
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


@pytest.mark.parametrize(
    ("name", "options", "weight_decay"),
    [
        *((name, options, 0.1) for name, options in VARIANTS),
        *((name, {}, 0.0) for name in NAMES if decay(name, 0.0)),
    ],
)
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


def test_aurora_leaves_a_row_that_is_dead():
    """Its norm goes into no division that another round could make infinite."""
    params, grads = trees()
    for g in grads:
        for x in g.values():
            x[:, 0] = 0
    assert_match("aurora", params, grads, rounds=3, damping=1.0)
    seen, _ = run(build("aurora", rounds=12, norm_eps=0.0), params, grads)
    for key, x in seen[-1].items():
        np.testing.assert_array_equal(x[:, 0], params[key][:, 0])
        assert np.isfinite(x).all()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=str)
@pytest.mark.parametrize("function", [contrib.Aurora(), contrib.Balance()], ids=str)
def test_functions_of_matrices_that_are_stored_transposed(function, shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32)
    found = jnp.swapaxes(function.transposed()(jnp.swapaxes(x, 1, 2)), 1, 2)
    np.testing.assert_allclose(found, function(x), atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1.0, 1e3, 1e25])
def test_muoneq_compares_its_eps_with_the_momentum_itself(size):
    """What keeps squares in range does not change the rule; the polar factor sees no scale."""
    x = np.random.default_rng(0).normal(size=(6, 9)) * size * 4.0 ** np.arange(6)[:, None]
    found = np.float64(contrib.Balance("row", 1.0)(jnp.asarray(x, jnp.float32)))
    expected = x / np.sqrt(np.sum(x**2, axis=1, keepdims=True) + 1.0)
    unit = [y / np.linalg.norm(y) for y in (found, expected)]
    np.testing.assert_allclose(*unit, atol=1e-6)


usual = functools.cache(build)  # with one function to update, which is traced once


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_change_nothing_and_later_steps_are_finite(name):
    params, grads = trees()
    zeros = jax.tree.map(np.zeros_like, params)
    (first, *_), _ = run(usual(name), params, [zeros])
    # Hyperball keeps norms by a division, which a GPU rounds.
    rounding = 2e-7 if name == "hyperball" and LESS_EXACT > 1 else 0
    for key in params:
        np.testing.assert_allclose(first[key], params[key], rtol=0, atol=rounding)
    # And a first real step after it is finite; so is one from parameters that are zero.
    for start in (params, zeros) if name != "hyperball" else (params,):
        after, _ = run(usual(name), start, [zeros, grads[0], zeros])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize("name", NAMES)
def test_scaling_the_gradient_does_not_change_the_steps(name):
    params, grads = trees()
    expected, _ = run(usual(name), params, grads)
    # Where a published eps counts, gradients must not come near it.
    sizes = {"mano": (1e-5, 1e5), "aurora": (1e-3, 1e15), "muoneq": (1, 1e15)}
    for size in sizes.get(name, (1e-15, 1e15)):
        sized = [{key: np.float32(size) * x for key, x in g.items()} for g in grads]
        scaled, _ = run(usual(name), params, sized)
        for key in params:
            np.testing.assert_allclose(scaled[-1][key], expected[-1][key], atol=2e-5)


def test_squares_of_adamuon_do_not_underflow_in_float16():
    """An entry of 1e-4 of a polar factor has a square below the least number of float16."""
    params, grads = trees(shapes={"up": (24, 36)}, dtype=jnp.float16)
    exact = [jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (params, *grads)]
    (_, state), (_, expected) = (
        run(build("adamuon", mu_dtype=jnp.float32), first, rest)
        for first, rest in ((params, grads), (exact[0], exact[1:]))
    )
    nu, oracle_nu = (x.inner_states["muon"].inner_state[0].nu["up"] for x in (state, expected))
    assert nu.dtype == jnp.float32 and np.all(nu > 0)
    np.testing.assert_allclose(nu, oracle_nu, rtol=2e-2)


@pytest.mark.parametrize(
    ("side", "sizes"),
    [("long", (4, 16)), ("long", (8, 16)), ("long", (8, 4)), ("long_row", (8, 4))],
)
def test_blocks_whose_longer_sides_differ_are_refused(side, sizes):
    """Means of rows, of columns and of whole blocks have no common array."""
    spec = omp.MatrixSpec(0, 1, split_sizes=sizes)
    tx = omp.optimizer(contrib.NorMuon(side=side), 0.1, rules=[("up", spec)])
    with pytest.raises(ValueError, match=r"^up/kernel: blocks of shapes .* do not join"):
        tx.init({"up": {"kernel": jnp.ones((8, sum(sizes)))}})


@pytest.mark.parametrize("sizes", [(9, 16), (12, 12, 16), (16, 1, 9)])
def test_blocks_of_other_sizes_on_one_side_are_as_if_separate(sizes):
    kernel = jax.random.normal(jax.random.key(0), (8, sum(sizes)))
    spec = omp.MatrixSpec(0, 1, split_sizes=sizes)
    stops = np.cumsum(sizes)[:-1]
    parts = dict(zip("abc", jnp.split(kernel, stops, 1), strict=False))
    tx = omp.optimizer(contrib.NorMuon(), 0.1, rules=[("w", spec)])
    fused, _ = tx.update({"w": kernel}, tx.init({"w": kernel}), {"w": kernel})
    alone = omp.optimizer(contrib.NorMuon(), 0.1, rules=[(".", omp.MuonDimensionNumbers(0, 1))])
    single, _ = alone.update(parts, alone.init(parts), parts)
    np.testing.assert_allclose(
        fused["w"], jnp.concatenate([*single.values()], 1), rtol=0, atol=1e-6
    )
