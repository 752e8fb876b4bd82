"""Functions applied to the matrices of leaves, in a few lines: this is what a chain means.

Every other ``run`` of a chain gives the same numbers, to the rounding of sums in another order.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_muonplus.frame.leaves import LeafInfo
from optax_muonplus.method import MatrixFunction, matrix_function, narrowed

# An elementwise function from the arrays that an operand is made of to the operand.
Read = Callable[..., jax.Array]
# The arrays that one operand is made of when it is read.
Sources = tuple[jax.Array, ...]
Run = Callable[
    [Sequence[MatrixFunction], Read, Sequence[Sources], Sequence[LeafInfo]], list[jax.Array]
]


@matrix_function
class ReadOne:
    """The read of an operand that is stored as it is."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


READ_ONE = ReadOne()


def plainly(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies functions to the matrices of leaves, one leaf after the other: the reference.

    It copies every matrix that is stored as (in, out), and leaves a mesh to the compiler. Its
    numbers are those of every other ``run`` of :func:`matrix_chain`, to the rounding of sums in
    another order.

    Args:
      functions: functions of matrices ``(batch, out, in)``, the first one first.
      read: an elementwise function from the arrays in a tuple to the parameter's matrices.
      sources: for each leaf a tuple of arrays of its shape and sharding, or with one number for
        each of its blocks.
      leaves: records of matrices.

    Returns:
      One array for each leaf, of its shape, in its dtype.
    """
    results = []
    for arrays, leaf in zip(sources, leaves, strict=True):
        blocks = []
        for x in leaf.matrix.to_matrices(read(*arrays)):
            dtype = x.dtype
            x = jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x
            for function in functions:
                x = function(x).astype(dtype)
            blocks.append(jnp.swapaxes(x, -1, -2) if leaf.matrix.transposed else x)
        results.append(narrowed(leaf.matrix.from_matrices(blocks), leaf.dtype))
    return results
