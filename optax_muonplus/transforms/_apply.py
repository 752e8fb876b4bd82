"""The one place where functions on matrices are applied to the leaves of a tree.

:func:`plainly` does it in a few lines: it is what a chain means. :func:`efficiently` gives the same
numbers by ``_execution``, which knows batches, backends and meshes. A chain gets one of the two.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus.frame import LeafInfo
from optax_muonplus.method import (
    MatrixFunction,
    Normalize,
    Orthogonalize,
    ScaleByShape,
    narrowed,
    supported,
)
from optax_muonplus.run import READ_ONE, Read, Sources, apply_local, apply_sharded, dtypes_of

Run = Callable[
    [Sequence[MatrixFunction], Read, Sequence[Sources], Sequence[LeafInfo]], list[jax.Array]
]


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


def efficiently(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies functions in batches of matrices as they are stored, and on a mesh by a plan.

    Arguments are those of :func:`plainly`. Results are sharded like the leaves.
    """
    results: dict[int, jax.Array] = {}
    local = [i for i, leaf in enumerate(leaves) if leaf.sharding is None]
    if local:
        inputs, records = [sources[i] for i in local], [leaves[i] for i in local]
        layouts = [leaf.matrix for leaf in records]
        given = zip(dtypes_of(read, inputs), records, strict=True)
        dtypes = [(dtype, leaf.dtype) for dtype, leaf in given]
        made = apply_local(functions, read, inputs, layouts, dtypes)
        results |= zip(local, made, strict=True)
    on_mesh = [i for i, leaf in enumerate(leaves) if leaf.sharding is not None]
    if on_mesh:
        inputs, records = [sources[i] for i in on_mesh], [leaves[i] for i in on_mesh]
        if any(x.shape != arrays[0].shape for arrays in inputs for x in arrays):
            # The compiler knows which numbers of blocks a shard needs, also where it cuts blocks.
            read, inputs = READ_ONE, [(read(*arrays),) for arrays in inputs]
        results |= zip(on_mesh, apply_sharded(functions, read, inputs, records), strict=True)
    return [narrowed(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def with_dtypes(leaves: Sequence[LeafInfo], dtypes: Sequence[Any]) -> list[LeafInfo]:
    """``leaves`` with other dtypes, so that results are not rounded to the leaves' own."""
    return [leaf._replace(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _is_known(function: MatrixFunction, dtype: Any) -> bool:
    """Whether a function of the library is defined for all matrices of ``dtype``."""
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
