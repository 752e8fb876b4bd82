"""Checks of resolved leaves, of gradients, and of what a user chooses."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from optax_muonplus.frame import DimensionNumbersTree, LeafInfo, flatten_with_names, path_name
from optax_muonplus.method import supported
from optax_muonplus.trees.flat import FlatTree
from optax_muonplus.trees.leaves import resolve
from optax_muonplus.trees.paths import check_inexact_dtypes
from optax_muonplus.trees.sharding import ShardingTree, concrete_sharding
from optax_muonplus.trees.user_rules import refuse_keystr


def check_only_matrices(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless all ``leaves`` are floating-point matrices."""
    check_inexact(leaves)
    others = [leaf.name for leaf in leaves if leaf.layout is None]
    if others:
        raise ValueError(
            f"Not matrices: {', '.join(others)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )


def check_inexact(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError for leaves that are not floating-point of 16 bits at least."""
    check_inexact_dtypes([leaf.path for leaf in leaves], [leaf.dtype for leaf in leaves])


def check_gradients(gradients: Any, like: Any, what: str = "parameter") -> None:
    """Raises ValueError, naming the leaves, unless gradients are those of ``like``.

    A gradient has its parameter's shape: NumPy's broadcasting would stretch a (1, 6) to (4, 6)
    without a word. It is floating-point, and complex if and only if the parameter is; a momentum
    buffer may be complex where the gradient is not, since ``mu_dtype`` says so. Leaves are matched
    by their paths, and those that are in one of the trees only are left to Optax.
    """
    like = gradients if like is None else like
    if jax.tree.structure(gradients) == jax.tree.structure(like):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True)
        if not any(_misfit(x, other, what) for x, other in pairs):
            return  # only a message needs names
    known = dict(zip(*flatten_with_names(like), strict=True))
    named = zip(*flatten_with_names(gradients), strict=True)
    misfits = [(path_name(path), _misfit(x, known.get(path, x), what)) for path, x in named]
    wrong = [f"{name} is {misfit}" for name, misfit in misfits if misfit]
    if wrong:
        raise ValueError(
            f"Gradients do not fit: {'; '.join(wrong)}. Each must have its parameter's shape, and"
            " be complex where that is. Call update(gradients, state, parameters) with gradients as"
            " jax.grad returns them, and leave out what is not trained."
        )


def _misfit(x: Any, other: Any, what: str) -> str:
    """Says why ``x`` is no gradient of ``other``; nothing if it is one."""
    dtype, is_complex = jnp.result_type(x), jnp.iscomplexobj(x)
    if not supported(dtype):
        return f"{dtype}, not floating-point of 16 bits at least"
    if np.shape(x) != np.shape(other):
        return f"{np.shape(x)}, its {what} {np.shape(other)}"
    if is_complex != jnp.iscomplexobj(other) and (is_complex or what == "parameter"):
        return f"{dtype}, its {what} {jnp.result_type(other)}"
    return ""


def beside_updates(updates: Any, params: Any) -> Any:
    """``params`` with None where ``updates`` are None, as for the static parts of a model.

    Equinox's own examples pass a whole model, some leaves of which are functions.
    """
    is_none = lambda x: x is None  # noqa: E731
    if params is None or not any(map(is_none, jax.tree.leaves(updates, is_leaf=is_none))):
        return params
    return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)


def check_given_shardings(
    names: Sequence[str], leaves: Sequence[Any], given: Sequence[NamedSharding | None]
) -> None:
    """Raises ValueError where ``leaves`` lie elsewhere than the argument ``sharding`` says."""
    wrong = [
        f"{name} is {actual.spec}, not {argument.spec}"
        for name, leaf, argument in zip(names, leaves, given, strict=True)
        if argument is not None
        and (actual := concrete_sharding(leaf)) is not None
        and not actual.is_equivalent_to(argument, leaf.ndim)
    ]
    if wrong:
        raise ValueError(
            f"The argument sharding disagrees with the parameters' shardings: {'; '.join(wrong)}."
            " Give the shardings that they have, or move them with jax.device_put first."
        )


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
    """The matrices of ``tree`` with one of the patterns in their paths; None means all."""
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
