"""A chain of links for the matrices of a tree, and AdamW for everything else."""

from collections.abc import Sequence
from typing import NamedTuple

import optax
from jax.typing import ArrayLike

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import ADAM, MUON, ResolvedTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.transforms._apply import MatrixTransformation, for_resolved


class AdamWArgs(NamedTuple):
    """Arguments of ``optax.adamw``."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    weight_decay: ArrayLike


def partition_with_adamw(
    links: Sequence[optax.GradientTransformation],
    adamw: AdamWArgs,
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A chain of links for the matrices of a tree, and AdamW for everything else.

    Args:
      links: of the chain. A :class:`MatrixTransformation` is told what each matrix is; its own
        dimension numbers and sharding are not used.
      adamw: AdamW's arguments.
      dimension_numbers: as in :func:`muonplus`.
      sharding: as in :func:`muonplus`.
    """
    others = optax.adamw(**adamw._asdict())

    def make(tree: ResolvedTree) -> optax.GradientTransformation:
        matrices = tree.matrices
        made = [
            link.make(matrices) if isinstance(link, MatrixTransformation) else link
            for link in links
        ]
        chain = optax.chain(*made)
        # Labels as a function: Optax would call a tree of labels that is an Equinox module with
        # __call__.
        return optax.partition({MUON: chain, ADAM: others}, lambda _: tree.labels)

    return for_resolved(make, dimension_numbers, sharding)
