"""Functions applied to the matrices of leaves, in a few lines: this is what a chain means."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_muonplus._chain.operand import Operand
from optax_muonplus._chain.program import Program
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._leaves.record import LeafInfo

Run = Callable[[Program, Sequence[Operand], Sequence[LeafInfo]], list[jax.Array]]


def run_plain(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies functions to the matrices of leaves, one leaf after the other: the reference.

    It copies every matrix that is stored as (in, out), and leaves a mesh to the compiler. Its
    numbers are those of every other ``run`` of :func:`optax_muonplus.matrix_chain`, to the rounding
    of sums in another order.

    Args:
      program: functions of matrices ``(batch, out, in)``, the first one first.
      operands: for each leaf an array of its shape and sharding.
      leaves: records of matrices.

    Returns:
      One array for each leaf, of its shape, in its dtype.
    """
    results = []
    for operand, leaf in zip(operands, leaves, strict=True):
        blocks = []
        for x in leaf.matrix.to_matrices(operand.load()):
            dtype = x.dtype
            x = jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x
            for function in program.functions:
                x = function(x).astype(dtype)
            blocks.append(jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x)
        results.append(saturating_cast(leaf.matrix.from_matrices(blocks), leaf.dtype))
    return results
