"""Stacks of matrices on accelerators: what is in them, and how much memory they need."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_muonplus as omp
from tests.support.batches import (
    RULES,
    D,
    everywhere_mapped,
    everywhere_stacked,
    layers,
    temporary_bytes,
)


def scanned(count, dtype):
    """The same in five leaves of ``count`` layers, and their dimension numbers."""
    each = layers(1)["block_0"]
    tree = {
        name: {"kernel": jax.ShapeDtypeStruct((count, *kernel["kernel"].shape), dtype)}
        for name, kernel in each.items()
    }
    return tree, omp.MuonDimensionNumbers(-2, -1)


@pytest.mark.parametrize("way", [everywhere_stacked, everywhere_mapped])
def test_scanned_layers_need_no_copy_of_a_leaf(way, monkeypatch):
    """In bfloat16: slices of four squares or one other, and the results, which are not copied."""
    way(monkeypatch, 4 * D * D * 4)
    tree, dims = scanned(64, jnp.bfloat16)
    tx = omp.scale_by_muonplus(weight_dimension_numbers=dims, compute_dtype="bfloat16")
    leaf = 64 * 4 * D * D * 2
    assert temporary_bytes(tx, tree) < 1.2 * leaf


def test_a_stack_holds_tall_and_wide_matrices_and_stops_at_the_bound(monkeypatch):
    everywhere_stacked(monkeypatch, 4 * (4 * D * D) * 4)
    seen = []

    @omp.matrices.matrix_function
    class Watched(omp.matrices.MatrixFunction):
        transpose_equivariant = True

        def __call__(self, x):
            seen.append(x.shape)
            return x

    tree = {**layers(4), "scanned": {"kernel": jax.ShapeDtypeStruct((9, D, 4 * D), jnp.float32)}}
    dims = functools.partial(omp.muon_dimension_numbers, rules=RULES[:1])
    tx = omp.transforms.apply_to_matrices([Watched()], weight_dimension_numbers=dims)
    jax.eval_shape(lambda t: tx.update(t, optax.EmptyState())[0], tree)
    # Twelve squares together; four up and four down, in two stacks; nine layers in slices of three.
    # Each is traced twice, for CPUs and for GPUs; a TPU works on one matrix at a time.
    expected = [(12, D, D), (4, D, 4 * D), (4, D, 4 * D), (3, D, 4 * D)]
    assert sorted(shape for shape in seen if shape[0] > 1) == sorted(2 * expected)
