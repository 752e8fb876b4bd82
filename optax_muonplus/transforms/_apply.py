"""The one place where functions on matrices are applied to the leaves of a tree.

It takes the matrices out of the leaves and puts the results back, in the right dtype.
``_execution`` runs the functions.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus._arguments import supported
from optax_muonplus._execution import (
    READ_ONE,
    Read,
    Sources,
    apply_local,
    apply_sharded,
    dtypes_of,
)
from optax_muonplus._parameters import LeafInfo
from optax_muonplus.matrices import MatrixFunction, narrowed


def apply_to_sources(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies ``functions`` to matrices that are made of several arrays, where they are read.

    Args:
      functions: functions of matrices.
      read: an elementwise function from the arrays in a tuple to the parameter's matrices.
      sources: for each leaf a tuple of arrays of its shape and sharding, or with one number for
        each of its blocks.
      leaves: records of matrices.

    Returns:
      One array for each leaf, of its shape and sharding, in its dtype.
    """
    results: dict[int, jax.Array] = {}
    local = [i for i, leaf in enumerate(leaves) if leaf.sharding is None]
    if local:
        inputs, records = [sources[i] for i in local], [leaves[i] for i in local]
        views = [leaf.matrix for leaf in records]
        given = zip(dtypes_of(read, inputs), records, strict=True)
        dtypes = [(dtype, leaf.dtype) for dtype, leaf in given]
        made = apply_local(functions, read, inputs, views, dtypes)
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


def check_function(functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless ``functions`` are defined, and keep the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once.
    """
    steps = [function.on("cpu") for function in functions]  # of one shape on all machines
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for leaf in leaves:
        for shape in leaf.matrix.block_shapes():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.name)
    for (probe, name), function in itertools.product(shapes.items(), steps):
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
