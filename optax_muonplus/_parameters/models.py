"""Models and states of training that are passed where their parameters belong."""

from collections.abc import Sequence
from typing import Any

from optax_muonplus._parameters.paths import Path, path_name

# Collections of Flax Linen that are not trained.
_NOT_TRAINED = {"batch_stats", "cache", "intermediates"}


def check_parameters(tree: Any, paths: Sequence[Path], leaves: Sequence[Any]) -> None:
    """Raises ValueError, which says where the parameters are, for a tree that has more in it."""
    if hasattr(tree, "params") and hasattr(tree, "opt_state"):
        raise ValueError(
            f"Got a {type(tree).__name__}, which has parameters and other things: pass its .params."
        )
    collections = {path[0] for path in paths if path}
    if "params" in collections and (others := sorted(collections & _NOT_TRAINED)):
        raise ValueError(
            f"Got the variables of a Flax model, of which {' and '.join(others)} are not trained:"
            " pass variables['params']."
        )
    wrong = [
        (path_name(path), x)
        for path, x in zip(paths, leaves, strict=True)
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex)
    ]
    if wrong and callable(getattr(tree, "init", None)) and callable(getattr(tree, "update", None)):
        raise ValueError("Got an optimizer in place of parameters: pass the parameters of a model.")
    if wrong:
        name, x = wrong[0]
        what = "a function" if callable(x) else f"of type {type(x).__name__}"
        raise ValueError(
            f"{name} is {what}, not an array. Pass the arrays of a model only, as"
            " eqx.filter(model, eqx.is_inexact_array) gives them for an Equinox model."
        )
