"""Stacks of matrices on accelerators: what is in them, and how much memory they need."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from optax_muonplus._execution.device import tpu
from tests.support.batches import (
    D,
    everywhere_mapped,
    everywhere_stacked,
    layers,
    temporary_bytes,
)
from tests.support.trees import assert_trees_close, random_like


def scanned(count):
    """The same in five leaves of ``count`` layers, and their dimension numbers."""
    each = layers(1)["block_0"]
    tree = {
        name: {"kernel": jax.ShapeDtypeStruct((count, *kernel["kernel"].shape), jnp.float32)}
        for name, kernel in each.items()
    }
    return tree, omp.MuonDimensionNumbers(-2, -1)


@pytest.mark.parametrize("way", [everywhere_stacked, everywhere_mapped])
def test_scanned_layers_need_no_copy_of_a_leaf(way, monkeypatch):
    """In float32, since XLA's CPU backend widens whole leaves of bfloat16.

    As on one device: on several a kernel of an accelerator gives results the sharding of their
    matrices, by a selection that XLA's CPU backend makes in a copy since jaxlib 0.12. Compiled for
    eight H100 the program needs as much memory with the selection as with a loop in its place.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    way(monkeypatch, 4 * D * D * 4)
    tree, dims = scanned(64)
    where = omp.Matrices(weight_dimension_numbers=dims)
    tx = omp.scale_by_muonplus(where=where, compute_dtype="float32")
    leaf = 64 * 4 * D * D * 4
    # A leaf of squares has a fourth of that. `jax.lax.map` in place of the loop takes 0.53.
    assert temporary_bytes(tx, tree) < 0.4 * leaf


def test_on_a_cpu_results_are_not_copied_to_get_a_sharding(monkeypatch):
    """Which nobody has to tell them on one device."""
    tree, dims = scanned(64)
    tx = omp.scale_by_muonplus(where=omp.Matrices(weight_dimension_numbers=dims))
    of_several = temporary_bytes(tx, tree)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert of_several < temporary_bytes(tx, tree) + 1000  # a leaf has 65,536 or 262,144


def test_a_stack_holds_matrices_of_one_shape_and_stops_at_the_bound(monkeypatch):
    everywhere_stacked(monkeypatch, 4 * (4 * D * D) * 4)
    seen = []

    @omp.matrices.matrix_function
    class Watched(omp.matrices.MatrixFunction):
        transpose_equivariant = True

        def __call__(self, x):
            seen.append(x.shape)
            return x

    tree = {**layers(4), "scanned": {"kernel": jax.ShapeDtypeStruct((9, D, 4 * D), jnp.float32)}}
    where = omp.Matrices([("scanned", omp.MuonDimensionNumbers(-2, -1))])
    tx = omp.matrix_chain(Watched(), where=where)
    jax.eval_shape(lambda t: tx.update(t, tx.init(t))[0], tree)
    seen = [shape for shape in seen if shape != (9, 4 * D, D)]  # a check of functions traces it
    # Twelve squares; four up; four down; nine layers in slices of three.
    expected = [(12, D, D), (4, D, 4 * D), (4, 4 * D, D), (3, D, 4 * D)]
    assert sorted(shape for shape in seen if shape[0] > 1) == sorted(expected)


def test_memory_that_nothing_was_written_to_is_not_read(monkeypatch):
    """A CPU gives zeros for it, where an accelerator gives what was there before."""
    grads = random_like({**layers(2), "scanned": scanned(3)[0]})
    tx = omp.scale_by_muonplus(
        where=omp.Matrices(weight_dimension_numbers=omp.MuonDimensionNumbers(-2, -1)),
        compute_dtype="float32",
    )
    state = tx.init(grads)
    expected, _ = tx.update(grads, state)
    everywhere_mapped(monkeypatch, block=24)  # no side but 16 fills its blocks
    asked = []

    def full_of_nan(shape, dtype, out_sharding):
        asked.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(jax.lax, "empty", full_of_nan)
    found, _ = jax.jit(tx.update)(grads, state)
    assert_trees_close(found, expected, atol=2e-5)
    assert (2, D, 64) in asked and (2, 64, D) in asked


RAGGED = {"up": (256, 300), "gate": (256, 300), "down": (300, 256), "q": (256, 256)}


def tpu_program(count):
    """An update of matrices with sides that fill no blocks, lowered for a TPU, not compiled."""
    lead, axis = ((), 0) if count == 1 else ((count,), 1)
    tree = {name: jax.ShapeDtypeStruct((*lead, *s), jnp.bfloat16) for name, s in RAGGED.items()}
    dims = omp.MuonDimensionNumbers(axis, axis + 1)
    tx = omp.scale_by_muonplus(
        compute_dtype="bfloat16", where=omp.Matrices(weight_dimension_numbers=dims)
    )
    update = jax.export.export(jax.jit(tx.update), platforms=["tpu"])
    return update(tree, jax.eval_shape(tx.init, tree)).mlir_module()


@pytest.mark.parametrize(
    ("count", "loops", "products"),
    [
        (1, ["2x300x256"], {"256x256": 25, "384x256": 5}),
        (
            3,
            ["3x256x256", "3x256x300", "3x256x300", "3x300x256"],
            {"256x256": 35, "256x384": 5, "384x256": 5},
        ),
    ],
    ids=["separate", "scanned"],
)
def test_a_tpu_multiplies_one_matrix_at_a_time_in_full_blocks(count, loops, products):
    """Loops go over stacks of two, or over leaves of three, all in bfloat16.

    Separate, ``up`` and ``gate`` are swapped: libtpu stores their long sides as rows.
    """
    program = tpu_program(count)
    # The iteration is in the program once for each shape: three products in each of five steps.
    results = collections.Counter(re.findall(r"dot_general.*-> tensor<(\w+)>", program))
    assert results == {f"{shape}xbf16": n for shape, n in products.items()}
    # Matrices are padded in the loop.
    padded = re.findall(r"stablehlo.pad.*-> tensor<(\w+)x\w+>", program)
    assert padded == (["384x256"] if count == 1 else ["384x256", "256x384"])
    carries = [set(re.findall(r"<(\d\w+)>", x)) for x in re.findall("stablehlo.while.*", program)]
    assert sorted(carries, key=sorted) == [{f"{shape}xbf16"} for shape in loops]


def stacks_of_a_tpu(monkeypatch, shapes, **options):
    """The program of an update for a TPU whose stacks hold 12 bytes for each of 16 x 48 numbers."""
    monkeypatch.setattr(tpu, "TPU_STACK_BYTES", 12 * 16 * 48)
    params = {name: {"kernel": jax.ShapeDtypeStruct(x, jnp.float32)} for name, x in shapes.items()}
    tx = omp.muonplus(0.02, **options)
    specs = params, jax.eval_shape(tx.init, params), params
    with jax.default_matmul_precision(None):
        return jax.export.export(jax.jit(tx.update), platforms=["tpu"])(*specs).mlir_module()


def test_stacks_of_a_tpu_count_results_of_another_dtype(monkeypatch):
    """Six bytes a number where products are in bfloat16, and four where results take the place."""
    shapes = {f"up{i}": (16, 48) for i in range(6)}
    for dtype, length in ((None, 2), ("float32", 3)):
        program = stacks_of_a_tpu(monkeypatch, shapes, compute_dtype=dtype)
        assert set(re.findall(r"while.*tensor<(\d)x16x48xf32>", program)) >= {str(length)}
        assert f"tensor<{length + 1}x16x48x" not in program


def test_a_stack_of_a_tpu_waits_for_the_results_of_the_last(monkeypatch):
    """XLA fills all stacks first if none waits: 451 MB of temporaries in place of 206."""
    shapes = {f"up{i}": (16, 48) for i in range(4)}
    barriers = re.findall(
        r"optimization_barrier (.*) : .*",
        stacks_of_a_tpu(monkeypatch, shapes, polar="newton_schulz"),
    )
    assert max(names.count("%") for names in barriers) == 3  # an empty stack, and two results
