"""A state that is sharded over replicas of the parameters (ZeRO-1)."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support import contrib
from tests.support.compilation import collectives
from tests.support.mesh import (
    AUTO,
    DIMS,
    EXPLICIT,
    FEW,
    TREE,
    D,
    P,
    alone,
    assert_same,
    gradients,
    lowered_update,
    make_mesh,
    modules_of,
    shape,
    shardings,
    two_steps,
)
from tests.support.trees import random_like

KINDS = {
    "auto": AUTO,
    "explicit": EXPLICIT,
    "mixed": (AUTO, EXPLICIT, AUTO),
    "replicas explicit": (EXPLICIT, AUTO, AUTO),
}


def replicated_mesh(kind):
    return make_mesh((2, 2, 2), ("r", "a", "b"), KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_device_and_has_a_part_on_each_replica(kind):
    """All leaves on Auto axes, which cut the state as the others do."""
    leaves = TREE if kind == "auto" else (*FEW, "down2", "replicated", "stacked")
    lie = modules_of(shardings(replicated_mesh(kind), "a", "b"), leaves)
    params = jax.device_put(modules_of(gradients(), leaves), lie)
    options = {"muon_weight_dimension_numbers": DIMS, "sharding": lie}
    updates, state = two_steps(omp.muonplus(0.1, state_sharding="r", **options), params)
    expected, expected_state = alone()
    assert_same(updates, modules_of(expected, leaves), lie)
    assert_same(state, of_those(leaves, expected_state, state))
    if kind in ("auto", "explicit"):
        plain = omp.muonplus(0.1, **options).init(params)
        assert bytes_of(state) == bytes_of(plain) // 2  # each leaf has an axis that divides


def of_those(leaves, state, like):
    """The arrays of ``state`` that belong to ``leaves``, or to none, as the tree ``like``."""
    found = [
        x
        for path, x in jax.tree.leaves_with_path(state)
        if not set(names_in(path)) & TREE.keys() - set(leaves)
    ]
    return jax.tree.structure(like).unflatten(found)


def names_in(path):
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def bytes_of(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if x.ndim)


def on_one(tree):
    return jax.device_put(jax.device_get(tree), jax.devices()[0])


def one_step(tx, params, grads):
    return jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)


def layers(n, **leaves):
    """``n`` layers on four replicas of two shards; parameters, and where they lie."""
    mesh = make_mesh((4, 2), ("data", "fsdp"))
    tree = {
        f"{name}{i}": {"kernel": shape(*size)} for i in range(n) for name, size in leaves.items()
    }
    tree |= {"embed": {"embedding": shape(8 * D, D)}, "norm": {"scale": shape(D)}}
    specs = {2: P("fsdp"), 1: P("fsdp")}
    return tree, jax.tree.map(lambda x: NamedSharding(mesh, specs[x.ndim]), tree)


@pytest.mark.parametrize("n", [2, 6])
def test_three_collectives_at_any_depth(n):
    tree, lie = layers(n, q=(D, D), up=(D, 4 * D), down=(4 * D, D))
    tx = omp.muonplus(0.1, sharding=lie, state_sharding="data")
    program = lowered_update(tx, tree, lie).compile()
    assert sorted(collectives(program)) == ["all-gather", "all-to-all", "all-to-all"]


def test_on_one_device_it_changes_nothing():
    """The same script runs on a laptop: arrays without a mesh have nothing to be cut over."""
    params = {"up": {"kernel": jnp.ones((8, 16))}, "down": {"kernel": jnp.ones((16, 8))}}
    plain, tx = omp.muonplus(0.1), omp.muonplus(0.1, state_sharding="r")
    state = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(plain.init(params))
    (given, _), (expected, _) = (x.update(params, x.init(params), params) for x in (tx, plain))
    assert_same(given, expected)


def test_any_optimizer():
    tree, lie = layers(2, q=(D, D))
    grads = jax.device_put(random_like(tree), lie)
    sharded = omp.transforms.shard_state(optax.adamw(0.1), lie, "data")
    updates, state = two_steps(sharded, grads)
    expected, expected_state = two_steps(optax.adamw(0.1), on_one(grads))
    assert_same(updates, expected, lie)
    assert_same(state, expected_state)
    assert state[0].mu["q0"]["kernel"].sharding.spec == P(("fsdp", "data"))


@pytest.mark.parametrize("name", contrib.WITH_STATE)
def test_every_baseline_with_a_state(name):
    tree, lie = layers(1, q=(D, D), up=(D, 4 * D))
    params, grads = (random_like(tree, seed) for seed in (1, 2))
    make = functools.partial(contrib.optimizer, name)
    lies = omp.transforms.state_layout(lie, "data")
    inner = make(0.1, where=omp.Matrices(sharding=lies))
    tx = omp.transforms.shard_state(inner, lie, "data")
    updates, state = one_step(tx, jax.device_put(params, lie), jax.device_put(grads, lie))
    expected, expected_state = one_step(make(0.1), on_one(params), on_one(grads))
    assert_same(updates, expected, lie)
    assert_same(state, expected_state)


def test_under_jit_on_auto_axes_it_needs_the_shardings():
    given = NamedSharding(replicated_mesh("auto"), P("a", "b"))
    params = jax.device_put({"q": {"kernel": jnp.ones((D, D))}}, given)
    with pytest.raises(ValueError, match="Pass sharding= too"):
        jax.jit(omp.muonplus(0.1, state_sharding="r").init)(params)
