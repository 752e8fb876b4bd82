"""Gradients and states of another model or optimizer: what messages say of them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._chain.paths import flatten_with_names, listed, path_name


def check_leaves(updates: optax.Updates, params: optax.Params) -> None:
    """Raises ValueError, with their paths, if gradients have other leaves than the parameters."""
    if jax.tree.structure(updates) == jax.tree.structure(params):
        return  # only a message needs names
    names, right = (
        {path_name(path) for path in flatten_with_names(tree)[0]} for tree in (updates, params)
    )
    lacking, more = (sorted(x) for x in (right - names, names - right))
    if lacking or more:
        found = f" Missing: {listed((x, None) for x in lacking)}." if lacking else ""
        found += f" Too many: {listed((x, None) for x in more)}." if more else ""
        raise ValueError(
            f"Gradients do not fit.{found} Call update(gradients, state, parameters) with gradients"
            " as jax.grad returns them. What is not trained is left out of all three, or gets"
            " optax.set_to_zero() in optax.partition."
        )


def check_state(old: optax.OptState, new: optax.OptState) -> None:
    """Raises ValueError unless an update keeps the structure and the shapes of its state.

    NumPy's broadcasting would stretch a running mean of another side, or of a kernel that was read
    the other way, to the shape of the matrix.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise wrong_state(old, new)
    pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
    if all(jnp.shape(x) == jnp.shape(y) for x, y in pairs):
        return  # only a message needs names
    wrong = [
        (path_name(path), f"is {jnp.shape(x)}, {jnp.shape(y)} after the update")
        for path, (x, y) in zip(flatten_with_names(old)[0], pairs, strict=True)
        if jnp.shape(x) != jnp.shape(y)
    ]
    raise ValueError(
        f"The state is of other options, or of another reading: {listed(wrong)}. Make it for these,"
        " tx.init(parameters), or go on from it in the middle of a run: state, report ="
        " optax_muonplus.take_over(state, tx.init(parameters), parameters)."
    )


def wrong_state(state: optax.OptState, expected: Any) -> ValueError:
    """Makes the error for ``state`` where one like ``expected``, or of its class, should be."""
    has, should = (list(dict.fromkeys(_classes(x))) for x in (state, expected))
    both = f"it has {', '.join(has) or 'none'}, where {', '.join(should)} should be"
    if has == should:
        both = f"other parts of {', '.join(has)}"
    return ValueError(
        f"Got the state of another optimizer: {both}. To go on from it in the middle of a run, make"
        " it the state of this one: state, report = optax_muonplus.take_over(state,"
        " tx.init(params), params). To start from the beginning, use tx.init(params)."
    )


def _classes(node: Any) -> Iterator[str]:
    """Yields the names of the classes of states, from the outside to the inside."""
    if isinstance(node, type):
        yield node.__name__
        return
    level = jax.tree_util.default_registry.flatten_one_level(node)
    if level is None or isinstance(node, optax.MaskedNode):
        return
    if isinstance(node, tuple):
        yield type(node).__name__ if hasattr(node, "_fields") else f"a chain of {len(node)}"
    for child in level[0]:
        yield from _classes(child)
