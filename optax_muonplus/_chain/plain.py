"""The meaning of a chain: functions applied to the matrices of leaves, in a few lines."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._core.precision import as_real, saturating_cast
from optax_muonplus._leaves.record import LeafInfo


class Run(Protocol):
    """Applies functions to the matrices of leaves, as :func:`run_plain` does."""

    def __call__(
        self,
        functions: Sequence[MatrixFunction],
        operands: Sequence[Operand],
        leaves: Sequence[LeafInfo],
        factor: jax.Array | None = None,
    ) -> list[jax.Array]: ...


def run_plain(
    functions: Sequence[MatrixFunction],
    operands: Sequence[Operand],
    leaves: Sequence[LeafInfo],
    factor: jax.Array | None = None,
) -> list[jax.Array]:
    """Applies functions to the matrices of leaves, one leaf after another: the reference.

    Every other ``run`` of :func:`optax_muonplus.matrix_chain` returns the same up to rounding: sums
    have another order, and accelerators may multiply in bfloat16 if ``compute_dtype`` is None. This
    one copies each matrix that is stored as (in, out), and leaves meshes to the compiler.

    Args:
      functions: of matrices ``(batch, out, in)``, in the order in which they run.
      operands: for each leaf, an array of its shape and sharding.
      leaves: records of matrices.
      factor: a number that multiplies all results, such as a learning rate.

    Returns:
      For each leaf, an array of its shape and dtype.
    """
    results = []
    for operand, leaf in zip(operands, leaves, strict=True):
        blocks = []
        for x in leaf.matrix.to_matrices(operand.load()):
            dtype = x.dtype
            x = jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x
            for function in functions:
                x = function(x).astype(dtype)
            x = x if factor is None else as_real(factor, jnp.finfo(dtype).dtype) * x
            blocks.append(jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x)
        results.append(saturating_cast(leaf.matrix.from_matrices(blocks), leaf.dtype))
    return results
