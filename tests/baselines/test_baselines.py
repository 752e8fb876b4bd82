"""The optimizers that Muon+ is compared with, against the oracles of `reference.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from optax_muonplus import baselines, muonplus
from tests.support import reference

STEPS = 5
# Kernels as Flax stores them, (in, out): W is their transpose.
SHAPES = {"tall": (12, 20), "wide": (20, 12), "square": (16, 16)}
NAMES = ("normuon", "adamuon", "turbo_muon", "mano")


def build(name, rate=0.05, **options):
    return getattr(baselines, name)(rate, **options)


def trees(seed=0, shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    params = {k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()}
    grads = [{k: rng.normal(size=s).astype(dtype) for k, s in shapes.items()} for _ in range(STEPS)]
    return params, grads


def run(tx, params, grads):
    """Parameters after each step."""
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def oracle_state(name, w):
    zeros = np.zeros(w.shape)
    return {
        "normuon": (zeros, np.zeros((w.shape[0], 1))),
        "adamuon": (zeros, zeros),
        "mano": (zeros, 0),
        "turbo_muon": zeros,
    }[name]


def oracle(name, w, grads, **options):
    """The matrix (out, in) after each step."""
    step = functools.partial(getattr(reference, f"{name}_step"), **options)
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
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_against_the_published_code(name, options, decay):
    params, grads = trees()
    tx = build(name, weight_decay=decay, **options)
    seen, _ = run(tx, params, grads)
    for key in SHAPES:
        expected = oracle(
            name,
            params[key].T,
            [g[key].T for g in grads],
            learning_rate=0.05,
            weight_decay=decay,
            **options,
        )
        for ours, theirs, before in zip(
            seen, expected, [params[key].T, *expected[:-1]], strict=True
        ):
            # Of all that has been added so far; the parameters alone would hide the updates.
            moved = np.linalg.norm(theirs - params[key].T)
            assert np.linalg.norm(ours[key].T - theirs) <= 1e-5 * moved, key
            assert np.linalg.norm(theirs - before) > 0


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_output_units_however_they_are_stored(name):
    params, grads = trees()
    upright = {k: MuonDimensionNumbers(1, 0) for k in params}
    stored, _ = run(build(name), params, grads)
    turned = jax.tree.map(np.transpose, params), [jax.tree.map(np.transpose, g) for g in grads]
    other, _ = run(build(name, muon_weight_dimension_numbers=upright), *turned)
    for key in params:
        np.testing.assert_allclose(stored[-1][key], other[-1][key].T, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_each_slice_and_each_block_is_a_matrix_of_its_own(name):
    params, grads = trees(shapes={"a": (8, 6), "b": (8, 10), "c": (8, 6)})
    alone, _ = run(build(name), params, grads)

    def stack(tree):
        return {"stack": np.stack([tree["a"], tree["c"]])}

    def fuse(tree):
        return {"fused": np.concatenate([tree["a"], tree["b"]], axis=1)}

    dims = {"stack": MuonDimensionNumbers(1, 2)}
    stacked, _ = run(
        build(name, muon_weight_dimension_numbers=dims), stack(params), [stack(g) for g in grads]
    )
    np.testing.assert_allclose(stacked[-1]["stack"], stack(alone[-1])["stack"], atol=3e-6)
    dims = {"fused": omp.MatrixSpec(0, 1, split_sizes=(6, 10))}
    fused, _ = run(
        build(name, muon_weight_dimension_numbers=dims), fuse(params), [fuse(g) for g in grads]
    )
    np.testing.assert_allclose(fused[-1]["fused"], fuse(alone[-1])["fused"], atol=3e-6)
    # Fused along the input side: each block has rows, and means of them, of its own.
    dims = {"fused": omp.MatrixSpec(0, 1, split_sizes=(6, 10), split_axis=0)}
    params, grads = trees(shapes={"a": (6, 8), "b": (10, 8)})
    alone, _ = run(build(name), params, grads)
    tall = [{"fused": np.concatenate([t["a"], t["b"]])} for t in (params, *grads)]
    fused, _ = run(build(name, muon_weight_dimension_numbers=dims), tall[0], tall[1:])
    expected = np.concatenate([alone[-1]["a"], alone[-1]["b"]])
    np.testing.assert_allclose(fused[-1]["fused"], expected, atol=3e-6)


STATES = {"normuon": (1, 1), "adamuon": (2, 0), "turbo_muon": (1, 0), "mano": (1, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_size_of_the_state(name):
    buffers, rows = STATES[name]
    params, _ = trees(shapes={"up": (12, 20)})
    state = build(name).init(params)
    sizes = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert sizes == buffers * 12 * 20 + rows * 20  # 20 output units
    half = build(name, mu_dtype=jnp.bfloat16).init(params)
    dtypes = {x.dtype.name for x in jax.tree.leaves(half) if x.ndim and x.size == 240}
    assert dtypes == {"bfloat16"}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_of_nothing(name):
    params, grads = trees()
    zeros = jax.tree.map(np.zeros_like, params)
    (first, *_), _ = run(build(name), params, [zeros])
    jax.tree.map(np.testing.assert_array_equal, first, params)
    # And a first real step after it is finite; so is one from parameters that are zero.
    for start in (params, zeros):
        after, _ = run(build(name), start, [zeros, grads[0], zeros])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize("name", NAMES)
def test_size_of_the_gradient_does_not_count(name):
    params, grads = trees()
    usual, _ = run(build(name), params, grads)
    for size in (1e-5, 1e5) if name == "mano" else (1e-15, 1e15):
        sized = [{key: np.float32(size) * x for key, x in g.items()} for g in grads]
        scaled, _ = run(build(name), params, sized)
        for key in params:
            np.testing.assert_allclose(scaled[-1][key], usual[-1][key], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_parameters(name):
    params, grads = jax.tree.map(jnp.asarray, trees(dtype=jnp.bfloat16))
    tx = build(name)
    updates, state = tx.update(grads[0], tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    again = tx.update(grads[0], state, params)[1]
    assert jax.tree.map(jnp.result_type, again) == jax.tree.map(jnp.result_type, state)


@pytest.mark.parametrize("name", NAMES)
def test_same_partition_as_muonplus(name):
    params = {
        "wte": {"embedding": np.ones((5, 4), np.float32)},
        "up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)},
    }
    grads = jax.tree.map(np.ones_like, params)
    options = {"adam_learning_rate": 0.3, "adam_weight_decay": 0.1, "adam_b2": 0.99}
    ours, _ = run(build(name, **options), params, [grads])
    theirs, _ = run(muonplus(0.05, **options), params, [grads])
    for path in (("wte", "embedding"), ("up", "bias")):
        np.testing.assert_array_equal(ours[0][path[0]][path[1]], theirs[0][path[0]][path[1]])
    assert (ours[0]["up"]["kernel"] != theirs[0]["up"]["kernel"]).any() or name == "turbo_muon"


def test_muonplus_row_is_normuon_without_memory():
    params, grads = trees()
    rule = {"beta2": 0.0, "shape_scale": "none", "nu_eps": 0.0}
    normuon = baselines.scale_by_normuon(**rule)
    plus = omp.scale_by_muonplus(norm="row", norm_eps=0.0, shape_scale="none", nesterov=True)
    polar = omp.scale_by_muonplus(norm="none", shape_scale="none", nesterov=True)
    ours, theirs, factor = (
        tx.update(grads[0], tx.init(params))[0] for tx in (normuon, plus, polar)
    )
    for key, (_, m) in SHAPES.items():
        scalar = np.linalg.norm(factor[key]) / np.sqrt(m)  # ||O||_F / sqrt(m)
        np.testing.assert_allclose(ours[key], scalar * theirs[key], rtol=2e-5, atol=1e-7)


def test_updates_of_equal_size():
    params, grads = trees()
    for tx in (baselines.scale_by_adamuon(), baselines.scale_by_normuon(rule="paper")):
        updates, _ = tx.update(grads[0], tx.init(params), params)
        for x in updates.values():
            assert np.sqrt(np.mean(np.square(x))) == pytest.approx(0.2, rel=1e-5)
    tx = baselines.scale_by_mano()
    updates, _ = tx.update(grads[0], tx.init(params), params)
    for key, x in updates.items():  # columns of W are rows here
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(x), axis=1)), 0.2, rtol=1e-5)
        inner = np.sum(x * params[key], axis=1) / np.linalg.norm(params[key], axis=1)
        assert np.abs(inner).max() < 1e-5


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", NAMES)
def test_in_shards(name, kind):
    params, grads = trees(shapes={"up": (16, 32), "down": (32, 16)})
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (kind, kind))
    places = {
        "up": NamedSharding(mesh, P("fsdp", "tensor")),
        "down": NamedSharding(mesh, P("tensor", "fsdp")),
    }
    alone, _ = run(build(name), params, grads)
    placed = jax.device_put(params, places)
    tx = build(name, sharding=places)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(placed)
    for x in jax.tree.leaves(state):
        if x.shape == (16, 32):
            assert x.sharding.is_equivalent_to(places["up"], 2)
    sharded, _ = run(tx, placed, [jax.device_put(g, places) for g in grads])
    for key in params:
        np.testing.assert_allclose(sharded[-1][key], alone[-1][key], atol=2e-5)
        assert sharded[-1][key].sharding.is_equivalent_to(places[key], 2)


@pytest.mark.parametrize("name", NAMES)
def test_injected_hyperparameters(name):
    params, grads = trees()
    static = ("ns_steps",) if name == "turbo_muon" else ()  # whose table has four rows, no more
    make = optax.inject_hyperparams(getattr(baselines, name), static_args=static)
    options = {"learning_rate": 0.05, "weight_decay": 0.1}
    injected, _ = run(make(**options), params, grads)
    plain, _ = run(build(name, weight_decay=0.1), params, grads)
    for key in params:
        np.testing.assert_allclose(injected[-1][key], plain[-1][key], atol=2e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: baselines.normuon(0.1, rule="other"), "Unknown rule 'other'. Known: code, paper"),
        (lambda: baselines.normuon(0.1, beta2=1.0), r"beta2 must be in \[0, 1\), got 1.0"),
        (lambda: baselines.adamuon(0.1, beta2=-0.1), r"beta2 must be in \[0, 1\)"),
        (lambda: baselines.normuon(0.1, shape_scale="big"), "Unknown shape_scale 'big'"),
        (lambda: baselines.turbo_muon(0.1, ns_coeffs="none"), "none"),
        (lambda: baselines.turbo_muon(0.1, ns_steps=9), "turbo"),
        (lambda: baselines.mano(0.1, beta=2.0), r"beta must be in \[0, 1\), got 2.0"),
    ],
)
def test_what_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_mano_without_parameters():
    params, grads = trees()
    tx = build("mano")
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads[0], tx.init(params))


@pytest.mark.parametrize("name", NAMES)
def test_leaves_that_are_no_matrices(name):
    with pytest.raises(ValueError, match="experts"):
        build(name).init({"experts": np.ones((2, 3, 4), np.float32)})
