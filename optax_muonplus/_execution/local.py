"""Functions on matrices that need not travel: each is whole on the device that works on it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.precision import narrower_dtype, saturating_cast
from optax_muonplus._execution.batches import MatrixBatch
from optax_muonplus._execution.device.cpu import work_in_loops
from optax_muonplus._execution.device.gpu import work_on_stacks
from optax_muonplus._execution.device.tpu import map_stacks
from optax_muonplus._execution.lower import Program, for_platform
from optax_muonplus._execution.platforms import Platform, on_its_platform
from optax_muonplus._leaves.layout import MatrixLayout


def apply_local(
    program: Program,
    operands: Sequence[Operand],
    layouts: Sequence[MatrixLayout],
    dtypes: Sequence[Any],
    platform: Platform | None = None,
) -> list[jax.Array]:
    """Applies ``program`` on one device, or as the compiler distributes it.

    ``dtypes`` are those of the results. ``platform`` is where it runs; None is the one that it is
    lowered for.
    """
    batches: list[MatrixBatch] = []
    stops = []
    for operand, layout, dtype in zip(operands, layouts, dtypes, strict=True):
        layouts_of = [layout.of_blocks(x.shape) for x in operand.arrays]
        if None in layouts_of:
            operand, layouts_of = Operand.of(operand.load()), [layout]
        parts = [v.to_matrices(x) for v, x in zip(layouts_of, operand.arrays, strict=True) if v]
        batches += [
            MatrixBatch(operand._replace(arrays=x), layout.transposed, operand.dtype, dtype)
            for x in zip(*parts, strict=True)
        ]
        stops.append(len(batches))
    outputs = apply_batched(program, batches, platform)
    return [
        layout.from_matrices(outputs[start:stop])
        for layout, (start, stop) in zip(layouts, itertools.pairwise([0, *stops]), strict=True)
    ]


def apply_batched(
    program: Program,
    batches: Sequence[MatrixBatch],
    platform: Platform | None = None,
) -> list[jax.Array]:
    """Applies ``program`` to every matrix of batches of any shapes.

    ``platform`` is where it runs; None is the one that the program is lowered for. Results are
    stored as the batches are, in their result dtypes.
    """
    if not batches:
        return []

    def on(platform: Platform) -> Callable[..., list[jax.Array]]:
        fast = for_platform(program, platform)

        def work(*arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
            given = [x.of(y) for x, y in zip(batches, arrays, strict=True)]
            if platform == "cpu":
                return work_in_loops(fast, given)
            on_accelerator = map_stacks if platform == "tpu" else work_on_stacks
            return on_accelerator(fast, given)

        return work

    arrays = [batch.operand.arrays for batch in batches]
    return on_its_platform(on, *arrays, platform=platform)


def apply_to_one(program: Program, batch: MatrixBatch, platform: Platform | None) -> jax.Array:
    """Applies ``program`` to a batch that one of several branches works on.

    Of all branches XLA reserves the memory of the one that takes most. So results that a function
    rounds are written rounded; XLA would write float32 where a norm reads them twice. LLaMA-7B then
    had 587 MB of temporaries on 256 chips of v5e, and so 409.
    """
    x = batch.operand.load()
    for function in for_platform(program, platform).stored(batch.transposed):
        x = function(x.astype(batch.dtype))
        if narrower_dtype(x.dtype, function.output_dtype) != x.dtype:
            x = jax.lax.optimization_barrier(x.astype(function.output_dtype))
    return saturating_cast(x.astype(batch.dtype), batch.result_dtype)
