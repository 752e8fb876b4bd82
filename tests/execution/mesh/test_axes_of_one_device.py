"""Explicit mesh axes of one device: types name them, and they cut nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus import transforms
from tests.support.contrib import WITH_STATE, build
from tests.support.mesh import EXPLICIT, D, P, make_mesh
from tests.support.trees import random_like

# With blocks of 8 bits along the rows, which "one" shards, or along the columns, by 256.
LEAVES = {
    "query": ((D, D), P("one", "many")),
    "key": ((D, D), P("one")),
    "up": ((D, 512), P("many", "one")),
    "gate": ((D, 512), P(None, ("one", "many"))),
}
MAXIMA = np.array([1.0, 8.0], np.float32)
# Optimizers by further arguments of muonplus.
STATES = {
    "int8": lambda **given: omp.muonplus(0.1, mu_dtype="int8", **given),
    "remainders": lambda **given: transforms.param_remainders(omp.muonplus(0.1, **given)),
    "recorded": lambda **given: omp.contrib.recorded(omp.muonplus(0.1, **given), every=1),
    "clipped": lambda **given: optax.chain(omp.muonplus(0.1, **given), omp.contrib.qk_clip(2.0)),
}
BFLOAT16 = ("remainders",)


def placed(x, mesh):
    """Arrays of :data:`LEAVES` by name; queries and keys belong to one module."""
    return jax.device_put(x, {n: NamedSharding(mesh, LEAVES[n][1]) for n in x}) if mesh else x


def module_of(leaves):
    return {"attn": {n: {"kernel": leaves[n]} for n in leaves}}


def two_updates(tx, mesh=None, names=tuple(LEAVES), dtype=jnp.float32, **extra):
    """The last updates, the state, and the types that it had from init on."""
    shapes = {n: jax.ShapeDtypeStruct(LEAVES[n][0], dtype) for n in names}
    given = module_of(placed(random_like(shapes), mesh))
    state = tx.init(given)
    types = jax.tree.map(jax.typeof, state)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(given, state, given, **extra)
    return updates, state, types


def assert_as_without_a_mesh(tx, alone, many, tolerance=1e-3, **given):
    mesh = make_mesh((1, many), ("one", "many"), EXPLICIT)
    with jax.set_mesh(mesh):
        updates, state, types = two_updates(tx, mesh, **given)
    assert jax.tree.map(jax.typeof, state) == types  # or each update would compile anew
    expected, _, _ = two_updates(alone, **given)
    for found, right in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        found, right = np.float32(found), np.float32(right)
        assert np.linalg.norm(found - right) <= tolerance * np.linalg.norm(right)


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("name", STATES)
def test_every_kind_of_state(name, many):
    given = {"max_logits": {"attn": jnp.asarray(MAXIMA)}} if name == "clipped" else {}
    if name in BFLOAT16:  # a number halfway between two may go to either
        given |= {"dtype": jnp.bfloat16, "tolerance": 0.1}
    tx = STATES[name]()
    assert_as_without_a_mesh(tx, tx, many, **given)


@pytest.mark.parametrize(("over", "kind"), [("one", "int8"), ("many", "recorded")])
def test_a_state_that_is_cut(over, kind):
    make = STATES[kind]
    assert_as_without_a_mesh(make(state_sharding=over), make(), 2)


@pytest.mark.parametrize("name", WITH_STATE)
def test_every_baseline_with_a_state(name):
    tx = build(name, mu_dtype="int8")
    assert_as_without_a_mesh(tx, tx, 1, names=("key",))
