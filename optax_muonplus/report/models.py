"""Whole models and states, which ``describe`` may get in place of parameters."""

from typing import Any

import jax


def check_no_state(tree: Any) -> None:
    """Raises ValueError for the state of an optimizer."""

    def is_state(x: Any) -> bool:
        root = type(x).__module__.partition(".")[0]
        return root in ("optax", "optax_muonplus") and type(x).__name__.endswith("State")

    # A whole model with its optimizer has a message of its own.
    if not hasattr(tree, "opt_state") and any(
        map(is_state, jax.tree.leaves(tree, is_leaf=is_state))
    ):
        raise ValueError(
            "Got the state of an optimizer in place of parameters: pass the parameters. A state"
            " does not say by which norm or other settings it was made: keep the arguments of the"
            " optimizer beside it."
        )


def without_static(tree: Any) -> Any:
    """Removes functions, words and numbers from an Equinox model; other trees stay as they are."""
    if not any(map(_is_equinox, jax.tree.leaves(tree, is_leaf=_is_equinox))):
        return tree
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, tree)


def _is_equinox(x: Any) -> bool:
    return any(base.__module__.startswith("equinox.") for base in type(x).__mro__)
