"""The entry of this folder: applies functions to the matrices of leaves, wherever they lie."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import AxisType, Mesh, PartitionSpec

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._execution.batches import group_by
from optax_muonplus._execution.local import apply_local
from optax_muonplus._execution.lower import Program, lower
from optax_muonplus._execution.mesh.exchange import apply_sharded
from optax_muonplus._execution.platforms import Platform, on_its_platform, platform_of
from optax_muonplus._leaves.placement import axes_of_type
from optax_muonplus._leaves.record import LeafInfo


def apply(
    functions: Sequence[MatrixFunction],
    operands: Sequence[Operand],
    leaves: Sequence[LeafInfo],
    factor: jax.Array | None = None,
) -> list[jax.Array]:
    """Applies functions like ``run_plain``, but in batches, and on a mesh by a plan."""
    results = dict[int, jax.Array]()
    pairs = list(zip(operands, leaves, strict=True))
    for group in group_by(pairs, lambda pair: (pair[0].dtype, pair[1].sharding is None)):
        some = [operands[i] for i in group], [leaves[i] for i in group]
        results |= zip(group, _apply(functions, *some, factor), strict=True)
    return [saturating_cast(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def _apply(
    functions: Sequence[MatrixFunction],
    operands: Sequence[Operand],
    leaves: Sequence[LeafInfo],
    factor: jax.Array | None,
) -> list[jax.Array]:
    """Applies functions to operands of one dtype; all leaves are on a mesh, or none is."""

    def on(platform: Platform) -> Callable[..., list[jax.Array]]:
        program = lower(functions, platform, operands[0].dtype, factor)
        place = apply_sharded if leaves[0].sharding else _apply_on_device

        def on_arrays(*arrays: tuple[Any, Any]) -> list[jax.Array]:
            pairs = zip(operands, arrays, strict=True)
            given = [x._replace(arrays=y, stored=z) for x, (y, z) in pairs]
            return place(program, [x.read_for(program.input_dtype) for x in given], leaves)

        return on_arrays

    arrays = [(x.arrays, x.stored) for x in operands]
    known = _platform(leaves, arrays)
    return on(known)(*arrays) if known else on_its_platform(on, *arrays)


def _platform(leaves: Sequence[LeafInfo], arrays: Any) -> Platform | None:
    """Returns the platform of a mesh in ``sharding=``, else JAX's default, or None when traced."""
    # An abstract mesh has no devices. After None, the functions are traced for every platform.
    meshes = (leaf.given_sharding.mesh for leaf in leaves if leaf.given_sharding)
    devices = (mesh.devices for mesh in meshes if isinstance(mesh, Mesh))
    backends = [x.flat[0].platform for x in devices]
    if not backends and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        backends = [jax.default_backend()]
    return platform_of(backends[0]) if backends else None


def _apply_on_device(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies a program to leaves on one device, or distributed by the compiler."""
    if any(isinstance(x, jax.core.Tracer) for operand in operands for x in operand.arrays):
        operands = [x.map(_with_mesh_type) for x in operands]
        layouts, dtypes = [x.matrix for x in leaves], [x.dtype for x in leaves]
        return apply_local(program, operands, layouts, dtypes)
    # Outside of jit, each operation is a separate program; a loop would compile at every call.
    results = []
    for operand, leaf in zip(operands, leaves, strict=True):
        layout = leaf.matrix
        matrices = [program(x, layout.transposed) for x in layout.to_matrices(operand.load())]
        results.append(layout.from_matrices(matrices))
    return results


def _with_mesh_type(x: jax.Array) -> jax.Array:
    """Gives an array made before ``jax.set_mesh`` a type on Explicit axes, which loops need."""
    mesh = jax.sharding.get_abstract_mesh()
    if not axes_of_type(mesh, AxisType.Explicit) or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))
