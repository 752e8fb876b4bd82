"""Which parameters are matrices: rules by path, labels, dimension-number trees, and errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from optax_muonplus._leaves.record import LeafInfo
from tests.support.trees import by_path, nested_shapes, random_tree


def test_a_field_called_value_keeps_its_name():
    """Flax NNX adds a last "value" to every path at init; a module's own field is not that."""

    class Attention(NamedTuple):
        query: jax.Array
        key: jax.Array
        value: jax.Array

    params = Attention(*random_tree([(4, 4)] * 3))
    dims = omp.muon_dimension_numbers(params, rules=[("value$", None)])
    assert omp.Matrices(weight_dimension_numbers=dims).read(params).labels == Attention(
        "muon", "muon", "adam"
    )


def test_a_bare_matrix_needs_no_path():
    assert omp.muon_dimension_numbers(jnp.ones((3, 4))) == Dims(0, 1)
    counted = {"a": jnp.zeros([], jnp.int32), "w": jnp.ones((3, 4))}
    read = omp.muon_dimension_numbers(counted, [("w", Dims(1, 0))])
    assert read == {"a": None, "w": Dims(1, 0)}
    assert omp.partition_labels([jnp.ones((3, 4)), jnp.ones(3)]) == ["muon", "adam"]


def test_first_rule_wins_and_the_users_come_before_the_default_ones():
    tree = nested_shapes(
        embed__kernel=(9, 8), conv__kernel=(3, 3, 4, 8), up__kernel=(8, 8), up__bias=(8,)
    )
    rules = [
        ("embed", Dims(1, 0)),
        ("conv", Dims((0, 1, 2), 3), 4),
        ("up/kernel", None),
        ("up", Dims(0, 1)),  # takes nothing: the rule before it was first, and vectors are none
    ]
    made = omp.muon_dimension_numbers(tree, rules)
    assert made["embed"]["kernel"] == Dims(1, 0)
    assert made["conv"]["kernel"] == Dims((0, 1, 2), 3)
    assert made["up"] == {"kernel": None, "bias": None}


def test_rules_that_match_nothing_are_an_error_that_lists_the_paths():
    tree = nested_shapes(up__kernel=(8, 8))
    with pytest.raises(ValueError, match=r"match no parameter: 'donw'.*up/kernel"):
        omp.muon_dimension_numbers(tree, [("donw", None)])


class Two(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(6, 4, rngs=rngs)])


@pytest.mark.parametrize("container", [dict, FrozenDict, "state", "pure"])
def test_one_tree_of_dimension_numbers_fits_every_container(container):
    """The paths of nnx variables end in `value` at init and not at update; lists become dicts."""
    state = nnx.state(Two(nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(state)
    params = {"state": state, "pure": pure}.get(container) or container(pure)
    tree = {"up": {"kernel": Dims(0, 1), "bias": None}, "layers": None}
    labels = omp.Matrices(weight_dimension_numbers=tree).read(params).labels
    if container != "state":  # a label stands in the place of a Variable
        assert jax.tree.structure(labels) == jax.tree.structure(params)
    expected = {"up/kernel": "muon", "up/bias": "adam"}
    assert by_path(labels) == expected | {"layers/0/kernel": "adam", "layers/0/bias": "adam"}


def test_dimension_numbers_of_a_vector_are_refused_by_its_path():
    params = nested_shapes(up__bias=(6,), up__kernel=(4, 6))
    with pytest.raises(ValueError, match=r"up/bias: .* axes of shape \(6,\)"):
        omp.muonplus(0.1, muon_weight_dimension_numbers=Dims()).init(params)


FROZEN = {"up": {"kernel": (64, 128)}, "experts_of": {"w": (4, 8, 8)}, "bias": (128,)}
TRAINED = {"lora_a": (64, 4), "lora_b": (4, 128)}


@pytest.mark.parametrize("how", ["None", "masked", "partition"])
def test_frozen_parameters_cost_nothing(how):
    """No state, no operations, no rule: one of them has a layout that no rule knows."""
    trained = random_tree(TRAINED)
    params = {"base": random_tree(FROZEN), "adapter": trained}
    tx = omp.muonplus(0.1)
    alone = tx.init(trained)
    if how == "None":
        params = {"base": None, "adapter": trained}
    elif how == "masked":
        tx = optax.masked(tx, {"base": False, "adapter": True})
    else:
        tx = optax.partition(
            {"train": tx, "freeze": optax.set_to_zero()}, {"base": "freeze", "adapter": "train"}
        )
    state = tx.init(params)
    sizes = [sum(x.size for x in jax.tree.leaves(s)) for s in (state, alone)]
    assert sizes[0] == sizes[1]
    flops = [
        jax.jit(t.update).lower(p, s, p).compile().cost_analysis()["flops"]
        for t, p, s in [(tx, params, state), (omp.muonplus(0.1), trained, alone)]
    ]
    assert flops[0] == flops[1]


def test_the_shape_of_a_leaf_is_not_made_anew_for_each_rule(monkeypatch):
    calls = []
    shape = LeafInfo.layer_shape.fget
    monkeypatch.setattr(LeafInfo, "layer_shape", property(lambda x: calls.append(x) or shape(x)))
    omp.muon_dimension_numbers(nested_shapes(a__kernel=(4, 6), b=(4, 6)), [("a", None)])
    assert 0 < len(calls) < 20
