"""Embeddings that only the class of their module, or a place in a list, gives away; tied ones."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.trees import by_path

KEY = jax.random.key(0)


def table():
    return eqx.nn.Embedding(50, 8, key=KEY)


def linear():
    return eqx.nn.Linear(8, 50, key=KEY)


class OwnEmbedding(eqx.Module):
    rows: jax.Array


class PatchEmbedding(eqx.Module):
    weight: jax.Array


class Lookup(typing.NamedTuple):
    weight: jax.Array


class EmbeddingParams(typing.NamedTuple):
    rows: jax.Array


def tied():
    """A pair whose layer has the weight of the table, as in Equinox' documentation."""
    return eqx.nn.Shared(
        (table(), linear()), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
    )


HOLDERS = {
    "list": [table()],
    "tuple": (linear(), table()),
    "dict": {"x": {"y": table()}},
    "sequential": eqx.nn.Sequential([table(), linear()]),
    "head reads the table": tied(),
    "stacked": eqx.filter_vmap(lambda key: eqx.nn.Embedding(50, 8, key=key))(
        jax.random.split(KEY, 3)
    ),
    "a class of one's own": OwnEmbedding(jnp.ones((50, 8))),
    "a named tuple": EmbeddingParams(jnp.ones((50, 8))),
}


def labels(tree):
    return by_path(omp.partition_labels(tree))


@pytest.mark.parametrize("name", HOLDERS)
def test_a_table_is_known_by_its_class_whatever_its_name(name):
    held = {"u": HOLDERS[name], "v": eqx.nn.Linear(8, 8, key=KEY)}
    params = eqx.filter(held, eqx.is_inexact_array)
    matrices = [path for path, label in labels(params).items() if label == "muon"]
    beside = {"tuple": ["u/0/weight"], "sequential": ["u/layers/1/weight"]}.get(name, [])
    assert matrices == [*beside, "v/weight"]
    assert "embedding" in omp.describe(params)
    # An optimizer that sees a part of the tree reads it in the same way.
    part = optax.masked(omp.muonplus(0.1), jax.tree.map(lambda x: x.ndim > 1, params))
    state = part.init(params)
    updates, _ = part.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    buffers = [x.shape for x in jax.tree.leaves(state) if x.shape == (50, 8)]
    assert len(buffers) == {"stacked": 0, "tuple": 3, "sequential": 3}.get(name, 2)


def test_norms_are_known_by_their_class():
    norms = {"a": eqx.nn.LayerNorm((4, 8)), "b": eqx.nn.WeightNorm(eqx.nn.Linear(4, 8, key=KEY))}
    found = labels(eqx.filter(norms, eqx.is_inexact_array))
    assert found["a/weight"] == found["b/g"] == "adam"
    assert found["b/layer/weight"] == "muon"


def test_classes_of_other_things_say_nothing():
    others = {"a": PatchEmbedding(jnp.ones((9, 8))), "b": Lookup(jnp.ones((9, 8)))}
    assert set(labels(others).values()) == {"muon"}


def test_a_model_of_nnx_is_described_as_its_state_is_read():
    """The optimizer gets a state, which has no classes."""

    class OwnEmbed(nnx.Module):
        def __init__(self):
            self.rows = nnx.Param(jnp.ones((9, 8)))

    class Model(nnx.Module):
        def __init__(self):
            self.x = OwnEmbed()

    assert omp.describe(Model()) == omp.describe(nnx.state(Model(), nnx.Param))
