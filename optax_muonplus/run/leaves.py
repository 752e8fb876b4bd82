"""The door of this room: functions applied to the matrices of leaves, wherever these lie."""

from collections.abc import Sequence

import jax
import jax.core

from optax_muonplus.frame import LeafInfo, Operand
from optax_muonplus.method import MatrixFunction, compose, for_layout, narrowed
from optax_muonplus.run.local import apply_local
from optax_muonplus.run.mesh import apply_sharded
from optax_muonplus.run.polar import for_platform


def efficiently(
    functions: Sequence[MatrixFunction], operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies functions in batches of matrices as they are stored, and on a mesh by a plan.

    Arguments are those of ``optax_muonplus.transforms.plainly``. Results are sharded like leaves.
    """
    results: dict[int, jax.Array] = {}
    for on_mesh, apply in ((False, _apply_on_device), (True, apply_sharded)):
        which = [i for i, leaf in enumerate(leaves) if (leaf.sharding is not None) == on_mesh]
        if which:
            some = [operands[i] for i in which], [leaves[i] for i in which]
            results |= zip(which, apply(functions, *some), strict=True)
    return [narrowed(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def _apply_on_device(
    functions: Sequence[MatrixFunction], operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies functions to leaves that are on one device, or distributed by the compiler."""
    if any(isinstance(x, jax.core.Tracer) for operand in operands for x in operand.arrays):
        layouts, dtypes = [x.matrix for x in leaves], [x.dtype for x in leaves]
        return apply_local(functions, operands, layouts, dtypes)
    # Outside of jit each operation is a program of its own, and a loop would be compiled anew at
    # every call.
    steps, results = for_platform(compose(functions)), []
    for operand, leaf in zip(operands, leaves, strict=True):
        function = for_layout(steps, leaf.matrix.transposed)
        matrices = [function(x) for x in leaf.matrix.to_matrices(operand.load())]
        results.append(leaf.matrix.from_matrices(matrices))
    return results
