"""The entry of this folder: applies functions to the matrices of leaves, wherever they lie."""

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
    """Applies functions as ``run_plain`` does, in batches, and on a mesh by a plan."""
    program, results = lower(functions, factor), dict[int, jax.Array]()
    for on_mesh, apply_to in ((False, _apply_on_device), (True, apply_sharded)):
        chosen = [i for i, leaf in enumerate(leaves) if (leaf.sharding is not None) == on_mesh]
        if chosen:
            some = [operands[i] for i in chosen], [leaves[i] for i in chosen]
            results |= zip(chosen, apply_to(program, *some), strict=True)
    return [saturating_cast(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def _apply_on_device(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies a program to leaves on one device, or distributed by the compiler."""
    if any(isinstance(x, jax.core.Tracer) for operand in operands for x in operand.arrays):
        operands = [x.map(_with_mesh_type) for x in operands]
        layouts, dtypes = [x.matrix for x in leaves], [x.dtype for x in leaves]
        return apply_local(program, operands, layouts, dtypes)
    # Outside of jit, each operation is a separate program; a loop would compile at every call.
    program, results = for_platform(program), []
    for operand, leaf in zip(operands, leaves, strict=True):
        layout = leaf.matrix
        matrices = [program(x, layout.transposed) for x in layout.to_matrices(operand.load())]
        results.append(layout.from_matrices(matrices))
    return results


def _with_mesh_type(x: jax.Array) -> jax.Array:
    """Gives an array made before ``jax.set_mesh`` a type on Explicit axes, as a loop needs."""
    mesh = jax.sharding.get_abstract_mesh()
    if not axes_of_type(mesh, AxisType.Explicit) or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))
