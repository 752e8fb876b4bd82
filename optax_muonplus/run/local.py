"""Functions on matrices that need not travel: each is whole on the device that works on it."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from optax_muonplus.frame import MatrixLayout
from optax_muonplus.method import MatrixFunction
from optax_muonplus.run.batches import READ_ONE, MatrixBatch, Read
from optax_muonplus.run.loops import Sources
from optax_muonplus.run.platform import Platform
from optax_muonplus.run.stacks import apply_batched


def apply_local(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    layouts: Sequence[MatrixLayout],
    dtypes: Sequence[tuple[Any, Any]],
    platform: Platform | None = None,
) -> list[jax.Array]:
    """Applies ``functions`` on one device, or as the compiler distributes it.

    ``read`` makes the matrices of the arrays in each tuple of ``sources``, which have their shape,
    or one number for each of their blocks. Each pair of ``dtypes`` has that of these matrices, and
    that of the result. ``platform`` is where it runs; None is the one that it is lowered for.
    """
    batches: list[MatrixBatch] = []
    stops = []
    for arrays, layout, pair in zip(sources, layouts, dtypes, strict=True):
        own_read, layouts_of = read, [layout.of_blocks(x.shape) for x in arrays]
        if None in layouts_of:
            own_read, arrays, layouts_of = READ_ONE, (read(*arrays),), [layout]
        parts = [v.to_matrices(x) for v, x in zip(layouts_of, arrays, strict=True) if v]
        blocks = zip(*parts, strict=True)
        batches += [MatrixBatch(x, layout.transposed, *pair, own_read) for x in blocks]
        stops.append(len(batches))
    outputs = apply_batched(functions, batches, platform)
    return [
        layout.from_matrices(outputs[start:stop])
        for layout, (start, stop) in zip(layouts, itertools.pairwise([0, *stops]), strict=True)
    ]
