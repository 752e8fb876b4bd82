"""Which parameters are matrices: rules by path, labels, dimension-number trees, and errors."""

from typing import NamedTuple

import jax

import optax_muonplus as omp
from tests.support.trees import random_tree


def test_a_field_called_value_keeps_its_name():
    """Flax NNX adds a last "value" to every path at init; a module's own field is not that."""

    class Attention(NamedTuple):
        query: jax.Array
        key: jax.Array
        value: jax.Array

    params = Attention(*random_tree([(4, 4)] * 3))
    dims = omp.muon_dimension_numbers(params, rules=[("value$", None)])
    assert omp.partition_labels(params, dims) == Attention("muon", "muon", "adam")
