"""The door of this room: functions applied to the matrices of leaves, wherever these lie."""

from collections.abc import Sequence

import jax

from optax_muonplus.frame import LeafInfo, Read, Sources
from optax_muonplus.method import MatrixFunction, narrowed
from optax_muonplus.run.local import apply_to_leaves
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
    for on_mesh, apply in ((False, apply_to_leaves), (True, apply_sharded)):
        which = [i for i, leaf in enumerate(leaves) if (leaf.sharding is not None) == on_mesh]
        if which:
            own = [sources[i] for i in which], [leaves[i] for i in which]
            results |= zip(which, apply(functions, read, *own), strict=True)
    return [narrowed(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]
