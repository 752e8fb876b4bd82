"""Functions applied to the matrices of leaves, in a few lines: this is what a chain means.

Every other ``run`` of a chain gives the same numbers, to the rounding of sums in another order.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus.frame.leaves import LeafInfo
from optax_muonplus.method import (
    MatrixFunction,
    Normalize,
    Orthogonalize,
    ScaleByShape,
    matrix_function,
    narrowed,
    supported,
)

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


def dtypes_of(read: Read, sources: Sequence[Sources]) -> list[Any]:
    """Returns the dtypes of operands; ``read`` is traced once for equal dtypes of sources."""
    given = [tuple(x.dtype for x in arrays) for arrays in sources]
    found = {
        dtypes: jax.eval_shape(read, *(jax.ShapeDtypeStruct((), x) for x in dtypes)).dtype
        for dtypes in dict.fromkeys(given)
    }
    return [found[dtypes] for dtypes in given]


def _is_known(function: MatrixFunction, dtype: Any) -> bool:
    """Tells whether a function of the library is defined for all matrices of ``dtype``."""
    if type(function) is Orthogonalize and not callable(function.polar):
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        operand = function.compute_dtype
        return operand is None or jnp.issubdtype(operand, jnp.complexfloating) == is_complex
    return type(function) in (Normalize, ScaleByShape)


def check_function(functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless ``functions`` are defined, and keep the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once, for functions that may not.
    """
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for leaf in leaves:
        for shape in leaf.matrix.block_shapes():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.name)
    for (probe, name), function in itertools.product(shapes.items(), functions):
        if _is_known(function, probe.dtype):
            continue
        try:
            result = jax.eval_shape(lambda x, function=function: function(x), probe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if getattr(result, "shape", None) != probe.shape:
            raise ValueError(
                f"{name}: a function on matrices must map arrays (*batch, out, in) to arrays of the"
                f" same shape; for {probe.shape} it gave {getattr(result, 'shape', result)}."
            )
        complex_only_now = jnp.iscomplexobj(result) and not jnp.iscomplexobj(probe)
        if not supported(result.dtype) or complex_only_now:
            raise ValueError(
                f"{name}: a function on matrices must map floating-point arrays to such, and real"
                f" ones to real ones; for {probe.dtype} it gave {result.dtype}. Cast its result."
            )
