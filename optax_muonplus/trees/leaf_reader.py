"""The reader that a chain gets: rules and shardings of this library."""

import dataclasses
from typing import Any

from optax_muonplus.frame import DimensionNumbersTree, ResolvedTree
from optax_muonplus.trees.checks import check_given_shardings
from optax_muonplus.trees.leaves import all_shardings, resolve
from optax_muonplus.trees.sharding import ShardingTree, shard_like_params


@dataclasses.dataclass(frozen=True, eq=False)
class LeafReader:
    """Reads a tree by dimension numbers and shardings, as a user gives them."""

    dimension_numbers: DimensionNumbersTree = None
    sharding: ShardingTree = None

    def __call__(self, tree: Any) -> ResolvedTree:
        """Returns the records of all leaves."""
        return resolve(tree, self.dimension_numbers, self.sharding)

    def placed(self, state: Any, tree: ResolvedTree) -> Any:
        """Returns ``state`` sharded as the parameters are, after a check of their shardings."""
        given = [leaf.given_sharding for leaf in tree.leaves]
        all_shardings(tree)
        check_given_shardings([leaf.name for leaf in tree.leaves], tree.arrays, given)
        paths, shapes = [x.path for x in tree.leaves], [x.shape for x in tree.leaves]
        return shard_like_params(state, paths, shapes, given)
