"""The entry of this folder: functions applied to the matrices of leaves, wherever these lie."""

from collections.abc import Sequence

import jax
import jax.core
from jax.sharding import AxisType, PartitionSpec

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._execution.local import apply_local
from optax_muonplus._execution.lower import Program, for_platform, lower
from optax_muonplus._execution.mesh.exchange import apply_sharded
from optax_muonplus._leaves.placement import axes_of_type
from optax_muonplus._leaves.record import LeafInfo


def apply(
    functions: Sequence[MatrixFunction],
    operands: Sequence[Operand],
    leaves: Sequence[LeafInfo],
    factor: jax.Array | None = None,
) -> list[jax.Array]:
    """Applies functions in batches of matrices as they are stored, and on a mesh by a plan.

    Arguments are those of ``optax_muonplus.transforms.run_plain``. Results are sharded like leaves.
    """
    program, results = lower(functions, factor), dict[int, jax.Array]()
    here = [i for i, leaf in enumerate(leaves) if leaf.sharding is None]
    there = [i for i, leaf in enumerate(leaves) if leaf.sharding is not None]
    if here:
        some = [operands[i] for i in here], [leaves[i] for i in here]
        results |= zip(here, _apply_on_device(program, *some), strict=True)
    if there:
        some = [operands[i] for i in there], [leaves[i] for i in there]
        results |= zip(there, apply_sharded(program, *some), strict=True)
    return [saturating_cast(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def _apply_on_device(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies functions to leaves that are on one device, or distributed by the compiler."""
    if any(isinstance(x, jax.core.Tracer) for operand in operands for x in operand.arrays):
        operands = [x.map(_typed_by_the_mesh) for x in operands]
        layouts, dtypes = [x.matrix for x in leaves], [x.dtype for x in leaves]
        return apply_local(program, operands, layouts, dtypes)
    # Outside of jit each operation is a program of its own, and a loop would be compiled anew at
    # every call.
    program, results = for_platform(program), []
    for operand, leaf in zip(operands, leaves, strict=True):
        layout = leaf.matrix
        matrices = [program(x, layout.transposed) for x in layout.to_matrices(operand.load())]
        results.append(layout.from_matrices(matrices))
    return results


def _typed_by_the_mesh(x: jax.Array) -> jax.Array:
    """Gives an array that was made before ``jax.set_mesh`` a type on Explicit axes.

    What a loop reads and writes would else have types of two meshes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not axes_of_type(mesh, AxisType.Explicit) or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))
