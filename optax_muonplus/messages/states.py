"""States of another optimizer or model: what messages say of them."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from optax_muonplus.messages.paths import flatten_with_names, is_hole, listed, path_name

_GRADIENTS = (
    " Call update(gradients, state, parameters) with gradients as jax.grad returns them. What is"
    " not trained is left out of all three, or gets optax.set_to_zero() in optax.partition."
)
_STATE = " Make it for these parameters: tx.init(parameters)."
# Classes of wrappers, and of links without arrays, do not tell optimizers apart.
_EVERYWHERE = ("EmptyState", "MaskedState", "PartitionState", "tuple")


def check_leaves(updates: optax.Updates, params: optax.Params) -> None:
    """Raises ValueError, with their paths, if gradients have other leaves than the parameters."""
    if jax.tree.structure(updates) == jax.tree.structure(params):
        return  # only a message needs names
    _check_names("Gradients do not fit.", _names(updates), _names(params), _GRADIENTS)


def explain(
    error: Exception,
    state: Any,
    updates: optax.Updates,
    params: optax.Params | None,
    first: Callable[[optax.Params], Any],
) -> None:
    """Raises ValueError, caused by ``error``, if the state is of another optimizer or model.

    States are compared after an error of an update only, because the one to compare with has to be
    made, by ``first``: ``optax.inject_hyperparams`` makes a transformation anew at every update,
    whose trace would take a tenth longer.
    """
    try:
        expected = jax.eval_shape(first, updates if params is None else params)
    except Exception:  # it says nothing of the state, and would hide the error
        return
    if classes_of(state) != classes_of(expected):
        raise wrong_state(state, classes_of(expected)) from error
    owner, remedy = "parameters", _STATE
    if any(x is None for x in jax.tree.leaves(updates, is_leaf=is_hole)):
        remedy = f" Some gradients are None: pass zeros there, or leave them out of init.{_STATE}"
    if params is None:  # gradients may be the ones that are wrong
        owner, remedy = "gradients", _GRADIENTS + _STATE
    # Counts belong to no parameter: an update that needs one says so itself.
    names = _names(state, least_ndim=1), _names(expected, least_ndim=1)
    _check_names(f"The state does not fit the {owner}.", *names, remedy, error)


def _names(tree: Any, least_ndim: int = 0) -> set[str]:
    """Returns the paths of leaves with so many axes or more."""
    paths_and_leaves = zip(*flatten_with_names(tree), strict=True)
    return {path_name(path) for path, x in paths_and_leaves if getattr(x, "ndim", 0) >= least_ndim}


def _check_names(
    said: str, names: set[str], right: set[str], remedy: str, error: Exception | None = None
) -> None:
    """Raises ValueError if a tree has other leaves than the expected ones."""
    lacking, more = (sorted(x) for x in (right - names, names - right))
    if lacking or more:
        found = f" Missing: {listed((x, None) for x in lacking)}." if lacking else ""
        found += f" Too many: {listed((x, None) for x in more)}." if more else ""
        raise ValueError(f"{said}{found}{remedy}") from error


def wrong_state(state: Any, expected: list[str]) -> ValueError:
    """Makes the error for ``state``, where one of the ``expected`` classes should be."""
    found = classes_of(state)
    has, should = _shown(found), _shown(expected)
    both = f"it has {has}, where {should} should be"
    if has == should:
        both = f"its other parts are the same, {has}"
    return ValueError(
        f"Got the state of another optimizer: {_differences(found, expected)} ({both}). To go on"
        " from it in the middle of a run, make it the"
        " state of this one: state, report = optax_muonplus.take_over(state, tx.init(params),"
        " params). To start from the beginning, use tx.init(params)."
    )


def _differences(found: list[str], expected: list[str]) -> str:
    """Says what a state lacks and has besides; of common parts only if nothing else differs."""
    lacking, more = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    telling = [name for name in (*lacking, *more) if not name.startswith(_EVERYWHERE)]
    said = []
    for names, word in ((lacking, "missing"), (more, "too many")):
        if shown := [_word(name) for name in names if not telling or name in telling]:
            said.append(f"{', '.join(shown)} {word}")
    return " and ".join(said) or "its parts have another order"


def _word(name: str) -> str:
    """Writes the class of a state, and the setting that makes it."""
    if name == "MaskedState":
        return "MaskedState, which a mask makes (weight_decay_mask, optax.masked),"
    return name.replace("tuple", "a chain")


def classes_of(state: Any) -> list[str]:
    """Returns the names of the classes of states, from the outside to the inside."""
    return list(_walk(state))


def _walk(node: Any) -> Iterator[str]:
    level = jax.tree_util.default_registry.flatten_one_level(node)
    if level is None or isinstance(node, optax.MaskedNode):
        return
    if isinstance(node, tuple):
        yield type(node).__name__ if hasattr(node, "_fields") else f"tuple of {len(node)}"
    for child in level[0]:
        yield from _walk(child)


def _shown(classes: list[str]) -> str:
    names = [name for name in dict.fromkeys(classes) if not name.startswith(_EVERYWHERE)]
    return ", ".join(names) or "no classes of states"
