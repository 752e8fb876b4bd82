"""The door of this room: functions applied to the matrices of leaves, wherever these lie."""

from collections.abc import Sequence

import jax

from optax_muonplus.frame import READ_ONE, LeafInfo, Read, Sources, dtypes_of
from optax_muonplus.method import MatrixFunction, narrowed
from optax_muonplus.run.local import apply_local
from optax_muonplus.run.mesh import apply_sharded


def efficiently(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies functions in batches of matrices as they are stored, and on a mesh by a plan.

    Arguments are those of ``optax_muonplus.transforms.plainly``. Results are sharded like leaves.
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
            # Block scales are left to the compiler, because a shard may cut a block.
            read, inputs = READ_ONE, [(read(*arrays),) for arrays in inputs]
        results |= zip(on_mesh, apply_sharded(functions, read, inputs, records), strict=True)
    return [narrowed(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]
