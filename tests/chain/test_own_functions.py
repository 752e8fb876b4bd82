"""Functions of a user see one matrix: models with and without stacked layers train alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus.transforms import run_plain
from tests.support.batches import everywhere_mapped, everywhere_stacked, play
from tests.support.mesh import EXPLICIT, P, make_mesh
from tests.support.trees import random_tree

# Each sums over all that it sees.
FUNCTIONS = {
    "norm": lambda x: x / jnp.linalg.norm(x),
    "mean": lambda x: x - x.mean(),
    "first axis": lambda x: x - x.mean(0, keepdims=True),
    "product": lambda x: x @ x.T @ x / jnp.sum(x * x),
}
LINKS = {
    "link": lambda f: [omp.momentum(), f],
    "alone": lambda f: [f],
    "polar": lambda f: [omp.momentum(), omp.orthogonalize(polar=f), omp.normalize("row")],
    "behind a polar factor": lambda f: [
        omp.orthogonalize(compute_dtype="float32"),
        f,
        omp.scale_by_shape(),
    ],
    "adaptive": lambda f: [omp.scale_by_muonplus(polar=f, adaptive=True)],
}
MACHINES = {
    "cpu": lambda patch: play(patch, "cpu"),
    "gpu": everywhere_stacked,
    "gpu, slices": lambda patch: everywhere_stacked(patch, 2 * 8 * 16 * 4),
    "tpu": everywhere_mapped,
}
STACKED = {"kernel": random_tree([(5, 8, 16)])[0], "one": random_tree([(8, 16)], seed=1)[0]}
DIMS = {"kernel": omp.MuonDimensionNumbers(1, 2), "one": omp.MuonDimensionNumbers(0, 1)}


def updated(tx, grads, jit=True):
    return (jax.jit(tx.update) if jit else tx.update)(grads, tx.init(grads))[0]


def separate(links, grads=STACKED, **options):
    """Updates of the same matrices as leaves of their own, stacked again."""
    layers = {str(i): x for i, x in enumerate(grads["kernel"])}
    found = updated(omp.matrix_chain(*links, **options), layers | {"one": grads["one"]})
    return {"kernel": jnp.stack([found[i] for i in layers]), "one": found["one"]}


def assert_same(found, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("links", "function"),
    [*(("link", function) for function in FUNCTIONS), *((links, "norm") for links in LINKS)][1:],
)
def test_stacked_layers_have_the_updates_of_separate_ones(links, function, monkeypatch):
    parts = LINKS[links](FUNCTIONS[function])
    expected = separate(parts, run=run_plain)
    own = omp.matrix_chain(*parts, weight_dimension_numbers=DIMS)
    assert_same(updated(own, STACKED, jit=False), expected)
    for machine in MACHINES.values():
        machine(monkeypatch)
        assert_same(updated(own, STACKED), expected)
        assert_same(separate(parts), expected)


def test_fused_blocks_and_links_of_optax_see_one_matrix():
    grads = {"kernel": random_tree([(8, 24)])[0]}
    specs = {"kernel": omp.MatrixSpec(0, 1, split_sizes=(8, 8, 8))}
    link = omp.matrix_chain(FUNCTIONS["norm"], weight_dimension_numbers=specs)
    for tx in (link, optax.chain(link), omp.optimizer(link, 1.0)):
        blocks = jnp.split(tx.update(grads, tx.init(grads), grads)[0]["kernel"], 3, axis=1)
        np.testing.assert_allclose([jnp.linalg.norm(x) for x in blocks], 1, rtol=1e-6)


@pytest.mark.several_devices
@pytest.mark.parametrize("types", [None, EXPLICIT])
def test_on_a_mesh_too(types):
    mesh = make_mesh((4, 2), "ab", *([types] if types else []))
    grads = {"kernel": random_tree([(6, 8, 16)])[0], "one": STACKED["one"]}
    placed = {
        "kernel": NamedSharding(mesh, P(None, "a", "b")),
        "one": NamedSharding(mesh, P("a", "b")),
    }
    links = LINKS["link"](FUNCTIONS["norm"])
    sharding = {} if types else {"sharding": placed}
    tx = omp.matrix_chain(*links, weight_dimension_numbers=DIMS, **sharding)
    with jax.set_mesh(mesh):
        found = updated(tx, jax.device_put(grads, placed))
        replicated = jax.device_put(grads, NamedSharding(mesh, P()))
        plain = updated(omp.matrix_chain(*links, weight_dimension_numbers=DIMS), replicated)
    expected = separate(links, grads)
    assert_same(found, expected)
    assert_same(plain, expected)


def test_a_leaf_without_matrices_and_derivatives_through_a_function():
    empty = {"kernel": jnp.zeros((0, 8, 16)), "one": STACKED["one"]}
    tx = omp.matrix_chain(FUNCTIONS["norm"], weight_dimension_numbers=DIMS)
    assert updated(tx, empty)["kernel"].shape == (0, 8, 16)
    slope = jax.grad(lambda g: jnp.sum(updated(tx, g)["kernel"] ** 2))(STACKED)["kernel"]
    np.testing.assert_allclose(slope, 0, atol=1e-6)  # a norm of 1 does not change
