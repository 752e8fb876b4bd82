"""States of other optimizers are refused, where a transformation is given one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

# Of wrappers, and of links without arrays: they do not tell optimizers apart.
_EVERYWHERE = ("EmptyState", "MaskedState", "PartitionState", "tuple")


def update_own_state(
    update: Callable[[], tuple[optax.Updates, Any]],
    init: Callable[[optax.Params], Any],
    like: optax.Params,
    state: Any,
) -> tuple[optax.Updates, Any]:
    """``update()``, with an error that says so if ``state`` is that of another optimizer.

    Nothing is compared unless the update fails or changes the structure of the state.

    Args:
      update: makes updates and a new state of ``state``.
      init: the first state for parameters.
      like: parameters, or updates.
      state: before the update.
    """
    try:
        result = update()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        expected = _classes(jax.eval_shape(init, like))
        if _classes(state) == expected:
            raise
        raise wrong_state(state, expected) from error
    after = result[1]
    if jax.tree.structure(after) != jax.tree.structure(state):
        expected = _classes(after)
        if _classes(state) != expected:
            raise wrong_state(state, expected)
    return result


def wrong_state(state: Any, expected: list[str]) -> ValueError:
    """The error for ``state``, where one of the ``expected`` classes should be."""
    return ValueError(
        f"Got the state of another optimizer: it has {_shown(_classes(state))}, where"
        f" {_shown(expected)} should be. To go on from it in the middle of a run, make it the"
        " state of this one: state, report = optax_muonplus.take_over(state, tx.init(params),"
        " params). To start from the beginning, use tx.init(params)."
    )


def _classes(state: Any) -> list[str]:
    """The names of the classes of states, from the outside to the inside."""
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
