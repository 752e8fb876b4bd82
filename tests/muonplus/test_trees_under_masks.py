"""Trees for the whole model around parts of it: masked, partitioned, or None as in Equinox."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_muonplus as omp
from tests.support.contrib import optimizer
from tests.support.trees import assert_trees_close, nested_shapes, random_like

D = omp.MuonDimensionNumbers
SHAPES = nested_shapes(
    up__kernel=(4, 6), up__bias=(6,), down__kernel=(6, 4), head__w=(3, 4, 5), head__b=(5,)
)
PARAMS, GRADS = random_like(SHAPES), random_like(SHAPES, seed=1)
DIMS = {
    "up": {"kernel": D(0, 1), "bias": None},
    "down": {"kernel": D(1, 0)},
    "head": {"w": D(-2, -1), "b": None},
}
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDING = jax.tree.map(lambda x: NamedSharding(MESH, PartitionSpec()), PARAMS)
TREES = {"muon_weight_dimension_numbers": DIMS, "sharding": SHARDING}
DECAY = {
    "weight_decay": 0.1,
    "weight_decay_mask": lambda params: jax.tree.map(lambda x: x.ndim > 0, params),
}

LEAVES = jax.tree.map(lambda x: True, PARAMS) | {"head": {"w": False, "b": False}}
MODULES = {"up": True, "down": True, "head": False}


def without_head(tree):
    return {**tree, "head": jax.tree.map(lambda x: None, tree["head"])}


def parted(mask):
    labels = jax.tree.map(lambda own: "own" if own else "other", mask)
    return lambda tx: optax.partition({"own": tx, "other": optax.sgd(1.0)}, labels)


WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, LEAVES),
    "masked by module": lambda tx: optax.masked(tx, MODULES),
    "masked by a function": lambda tx: optax.masked(tx, lambda params: LEAVES),
    "partition": parted(LEAVES),
    "partition by module": parted(MODULES),
    "None": lambda tx: tx,
}
with_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)
RIVALS = ("normuon", "adamuon", "aurora", "muoneq", "turbo_muon", "mano")
DECAYING = {
    "muonplus": omp.muonplus,
    "muon": omp.muon,
}
RIVALS = {name: functools.partial(optimizer, name) for name in RIVALS}
WHERE = {"where": omp.Matrices(weight_dimension_numbers=DIMS, sharding=SHARDING)}
MAKERS = {
    **{name: functools.partial(make, 0.1, **TREES, **DECAY) for name, make in DECAYING.items()},
    **{name: functools.partial(make, 0.1, **WHERE, **DECAY) for name, make in RIVALS.items()},
    "hyperball": functools.partial(omp.contrib.hyperball, 0.1, **WHERE),  # it has no decay
}


def two_updates(tx, params, grads):
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    return tx.update(grads, state, params)[0]


def given(wrapper):
    return (PARAMS, GRADS) if wrapper != "None" else tuple(map(without_head, (PARAMS, GRADS)))


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [("muonplus", x) for x in WRAPPERS] + [(x, "masked") for x in MAKERS if x != "muonplus"],
)
def test_every_optimizer_ignores_entries_of_what_is_left_out(name, wrapper):
    params, grads = given(wrapper)
    tx = WRAPPERS[wrapper](MAKERS[name]())
    updates = jax.eval_shape(functools.partial(two_updates, tx), params, grads)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@with_wrappers
def test_the_others_are_updated_as_without_a_mask(wrapper):
    params, grads = given(wrapper)
    tx = omp.muonplus(0.1, polar="svd", **TREES, **DECAY)
    expected = two_updates(tx, PARAMS, GRADS)
    updates = two_updates(WRAPPERS[wrapper](tx), params, grads)
    for module in ("up", "down"):
        assert_trees_close(updates[module], expected[module])


LINKS = {
    "orthogonalize": omp.orthogonalize,
    "scale_by_muonplus": omp.scale_by_muonplus,
    "chain": functools.partial(omp.matrix_chain, omp.momentum(), jnp.sign),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_take_the_trees_of_the_whole_model_too(name):
    where = omp.Matrices(weight_dimension_numbers=DIMS, sharding=SHARDING)
    tx = LINKS[name](where=where)
    labels = tx.labels(PARAMS)
    tx = optax.partition({"muon": tx, "adam": optax.adamw(0.1)}, labels)
    updates = jax.eval_shape(functools.partial(two_updates, tx), PARAMS, GRADS)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)


@with_wrappers
def test_rules_and_patterns_may_be_for_what_is_left_out(wrapper):
    params, _ = given(wrapper)
    head = [("head/w", D(-2, -1))]
    heads = {"up/kernel": 2, "head/w": 5}
    for options in (
        {"rules": head, "layer_axes": {"^head": 0}},
        {"muon_weight_dimension_numbers": omp.per_head(heads, rules=head)},
    ):
        tx = WRAPPERS[wrapper](omp.muonplus(0.1, **options))
        jax.eval_shape(tx.init, params)


@with_wrappers
def test_heads_are_found_beside_a_query_that_is_left_out(wrapper):
    tree = nested_shapes(attn__query__kernel=(6, 4), attn__key__kernel=(6, 4))
    hole = {"None": None}.get(wrapper, optax.MaskedNode())
    left = {"attn": {"query": {"kernel": hole}, "key": tree["attn"]["key"]}}
    table = omp.describe(left, omp.per_head(2))
    assert "2x6x2" in table and "per head" in table
    jax.eval_shape(omp.muonplus(0.1, muon_weight_dimension_numbers=omp.per_head(2)).init, left)


@with_wrappers
def test_describe_and_the_recorder_take_them(wrapper):
    hole = {"None": None}.get(wrapper, optax.MaskedNode())
    left = {**PARAMS, "head": hole if "module" in wrapper else {"w": hole, "b": hole}}
    table = omp.describe(left, DIMS, sharding=SHARDING)
    assert "up/kernel" in table and "head" not in table
    tx = omp.contrib.recorded(optax.sgd(0.1), every=1)
    assert "down/kernel" in omp.contrib.read_record(tx.init(left)).values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"muon_weight_dimension_numbers": {"up": DIMS["up"]}}, "down/kernel has nothing"),
        ({"muon_weight_dimension_numbers": {**DIMS, "down": "none"}}, "down/kernel has none"),
        ({"sharding": {"up": SHARDING["up"]}}, "shardings do not match .* down/kernel has nothing"),
    ],
)
def test_a_wrong_structure_keeps_its_message(options, message):
    tx = optax.masked(omp.muonplus(0.1, **{**TREES, **options}), LEAVES)
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)


def test_a_pattern_that_finds_nothing_beside_empty_fields_is_still_refused():
    tx = omp.muonplus(0.1, rules=[("haed/w", None)])
    with pytest.raises(ValueError, match="Patterns that match no parameter: 'haed/w'"):
        tx.init(without_head(PARAMS))
