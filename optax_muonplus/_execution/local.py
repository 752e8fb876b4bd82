"""Applies functions to matrices, each of them whole on one device."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.precision import narrower_dtype, saturating_cast
from optax_muonplus._execution.batches import MatrixBatch
from optax_muonplus._execution.device.cpu import apply_in_loops
from optax_muonplus._execution.device.gpu import apply_in_stacks
from optax_muonplus._execution.device.tpu import apply_one_by_one
from optax_muonplus._execution.lower import Program
from optax_muonplus._leaves.layout import MatrixLayout


def apply_local(
    program: Program,
    operands: Sequence[Operand],
    layouts: Sequence[MatrixLayout],
    dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Applies ``program`` to leaves on one device, or as the compiler distributes them."""
    batches: list[MatrixBatch] = []
    stops = []
    for operand, layout, dtype in zip(operands, layouts, dtypes, strict=True):
        array_layouts = [layout.of_blocks(x.shape) for x in operand.arrays]
        if None in array_layouts:
            operand, array_layouts = Operand.of(operand.load()), [layout]
        parts = [v.to_matrices(x) for v, x in zip(array_layouts, operand.arrays, strict=True) if v]
        batches += [
            MatrixBatch(operand._replace(arrays=x), layout.transposed, operand.dtype, dtype)
            for x in zip(*parts, strict=True)
        ]
        stops.append(len(batches))
    outputs = apply_batched(program, batches)
    return [
        layout.from_matrices(outputs[start:stop])
        for layout, (start, stop) in zip(layouts, itertools.pairwise([0, *stops]), strict=True)
    ]


def apply_batched(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to batches of any shapes; each result is stored like its batch."""
    functions = {"cpu": apply_in_loops, "gpu": apply_in_stacks, "tpu": apply_one_by_one}
    return functions[program.platform](program, batches) if batches else []


def apply_to_one(program: Program, batch: MatrixBatch) -> jax.Array:
    """Applies ``program`` to one batch, in a branch of ``jax.lax.switch``."""
    # XLA reserves memory for the largest branch, and would write float32 where a norm reads results
    # twice. With rounded results, LLaMA-7B on 256 v5e chips has 409 MB of temporaries, not 587.
    x = batch.operand.load()
    for function in program.stored(batch.transposed):
        x = function(x.astype(batch.dtype))
        if narrower_dtype(x.dtype, function.output_dtype) != x.dtype:
            x = jax.lax.optimization_barrier(x.astype(function.output_dtype))
    return saturating_cast(x.astype(batch.dtype), batch.result_dtype)
