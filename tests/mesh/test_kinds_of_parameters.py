"""Rates and steps by pattern on a mesh, as the page on decay and rates has them, and their cost."""

import jax
import optax
import pytest

import optax_muonplus as omp
from tests.support.compilation import collectives
from tests.support.mesh import (
    AUTO,
    EXPLICIT,
    D,
    NamedSharding,
    P,
    assert_same,
    lowered_update,
    make_mesh,
    shape,
    two_steps,
)
from tests.support.trees import random_like

TREE = {
    f"block_{i}": {
        "attn": {"kernel": shape(D, D)},
        "mlp": {"kernel": shape(D, 4 * D), "bias": shape(4 * D)},
    }
    for i in range(8)
}


def kinds(params):
    def kind(path, _):
        return "mlp" if "mlp" in jax.tree_util.keystr(path) else "rest"

    return jax.tree_util.tree_map_with_path(kind, params)


def by_rates(sharding=None):
    factors = optax.partition({"mlp": optax.scale(2.0), "rest": optax.identity()}, kinds)
    return optax.chain(omp.muonplus(0.1, weight_decay=0.1, sharding=sharding), factors)


def by_steps(sharding=None):
    more = omp.muonplus(0.2, "polar_express", 8, sharding=sharding)
    return optax.partition({"mlp": more, "rest": omp.muonplus(0.1, sharding=sharding)}, kinds)


def placed(kind):
    mesh = make_mesh((4, 2), "ab", kind)
    cut = {1: P("a"), 2: P("a", "b")}
    return jax.tree.map(lambda x: NamedSharding(mesh, cut[x.ndim]), TREE)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("make", [by_rates, by_steps])
def test_each_kind_has_its_own_and_a_mesh_changes_nothing(make, kind):
    grads, wanted = random_like(TREE), placed(kind)
    alone, _ = two_steps(make(), grads)
    plain, _ = two_steps(omp.muonplus(0.1, weight_decay=0.1 * (make is by_rates)), grads)
    assert_same(alone["block_1"]["attn"], plain["block_1"]["attn"])
    if make is by_rates:
        doubled = jax.tree.map(lambda x: 2 * x, plain["block_1"]["mlp"])
        assert_same(alone["block_1"]["mlp"], doubled)
    found, _ = two_steps(make(wanted), jax.device_put(grads, wanted))
    assert_same(found, alone, wanted)


def test_factors_are_free_and_each_optimizer_has_its_own_two_collectives():
    wanted = placed(AUTO)

    def number(tx):
        return len(collectives(lowered_update(tx, TREE, wanted).compile()))

    plain = number(omp.muonplus(0.1, sharding=wanted))
    assert number(by_rates(wanted)) == plain == 2
    assert number(by_steps(wanted)) == 4
