"""Checks of resolved leaves, of gradients, and of what a user chooses."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

from optax_muonplus.frame import DimensionNumbersTree, LeafInfo
from optax_muonplus.trees.flat import FlatTree
from optax_muonplus.trees.leaves import resolve
from optax_muonplus.trees.sharding import ShardingTree
from optax_muonplus.trees.user_rules import refuse_keystr


def check_patterns(only: Sequence[str] | None) -> tuple[re.Pattern[str], ...] | None:
    """Compiles ``only``."""
    if only is None:
        return None
    given = (only,) if isinstance(only, str) else tuple(only)
    if not given:
        raise ValueError("only=() chooses no matrix. Pass regular expressions, or None for all.")
    try:
        compiled = tuple(re.compile(pattern) for pattern in given)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"only={only!r} must be regular expressions, searched in paths such as"
            f" blocks/0/attn/query/kernel: {error}."
        ) from error
    for pattern in given:
        refuse_keystr(pattern, "only")
    return compiled


def select(
    tree: Any,
    only: Sequence[re.Pattern[str]] | None = None,
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> list[LeafInfo]:
    """Finds the matrices of ``tree`` with one of the patterns in their paths; None means all."""
    resolved = resolve(tree, dimension_numbers, sharding)
    leaves, matrices = resolved.leaves, resolved.matrices
    # The placeholder that optax.tree.map_params asks about has no leaves.
    if leaves and not matrices:
        shapes = ", ".join(f"{leaf.name} {leaf.shape}" for leaf in leaves)
        raise ValueError(
            f"There is no matrix, and so no rows and columns, among {shapes}. Say with dimension"
            " numbers how they are matrices, or leave this part of the tree out."
        )
    if only is None or not leaves:
        return matrices
    for pattern in only:
        found = [leaf for leaf in leaves if pattern.search(leaf.name)]
        if any(leaf.layout is not None for leaf in found):
            continue
        if found:
            raise ValueError(
                f"only={pattern.pattern!r} matches {', '.join(leaf.name for leaf in found)}, which"
                " are not matrices and have no rows and columns to measure: AdamW updates them."
                " Leave the pattern out, or give them dimension numbers."
            )
        if FlatTree.of(tree).may_have_had(pattern.pattern):
            continue
        paths = [leaf.name for leaf in matrices]
        near = difflib.get_close_matches(pattern.pattern, paths, n=5, cutoff=math.ulp(0))
        raise ValueError(
            f"only={pattern.pattern!r} matches no matrix. The nearest paths are {', '.join(near)}."
            " Patterns are regular expressions, searched in the path."
        )
    return [leaf for leaf in matrices if any(pattern.search(leaf.name) for pattern in only)]
