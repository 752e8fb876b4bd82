"""Models and states of training that are passed where their parameters belong."""

import functools
from typing import Any

import jax

from optax_muonplus.messages import flatten_with_names, listed, path_name
from optax_muonplus.trees.flat import FlatTree

# Collections of Flax Linen that are not trained.
_NOT_TRAINED = {"batch_stats", "cache", "intermediates"}
# Variables of Flax NNX that are not trained; kinds of a user's own may be.
_STATE = {"BatchStat", "Cache", "Intermediate", "OptState", "Perturbation", "RngState"}


def check_parameters(flat: FlatTree) -> None:
    """Raises ValueError, which says where the parameters are, for a tree that has more in it."""
    tree = flat.tree
    if hasattr(tree, "params") and hasattr(tree, "opt_state"):
        raise ValueError(
            f"Got a {type(tree).__name__}, which has parameters and other things: pass its .params."
        )
    if hasattr(tree, "opt_state"):
        raise ValueError(
            f"Got an {type(tree).__name__}, which has the state of an optimizer: pass"
            " nnx.state(model, nnx.Param) of its model."
        )
    collections = {path[0] for path in flat.paths if path}
    if "params" in collections and (others := sorted(collections & _NOT_TRAINED)):
        raise ValueError(
            f"Got the variables of a Flax model, of which {' and '.join(others)} are not trained:"
            " pass variables['params']."
        )
    if any(map(_is_state_class, flat.classes)):
        _check_variables(tree)
    _check_arrays(flat)


def _check_arrays(flat: FlatTree) -> None:
    """Raises ValueError for leaves that are neither arrays nor numbers, or for no tree at all."""
    tree = flat.tree
    wrong = [
        (path_name(path), x)
        for path, x in zip(flat.paths, flat.arrays, strict=True)
        if getattr(x, "dtype", None) is None and not isinstance(x, int | float | complex)
    ]
    if wrong and callable(getattr(tree, "init", None)) and callable(getattr(tree, "update", None)):
        raise ValueError("Got an optimizer in place of parameters: pass the parameters of a model.")
    if wrong and wrong[0][0] == path_name(()):
        kind = getattr(tree, "__name__", type(tree).__name__)
        raise ValueError(
            f"Got {kind} in place of parameters. They are variables['params'] in Flax Linen,"
            " nnx.state(model, nnx.Param) in NNX, eqx.filter(model, eqx.is_inexact_array) in"
            " Equinox."
        )
    if wrong:
        name, x = wrong[0]
        what = "a function" if callable(x) else f"of type {type(x).__name__}"
        raise ValueError(
            f"{name} is {what}, not an array. Pass the arrays of a model only, as"
            " eqx.filter(model, eqx.is_inexact_array) gives them for an Equinox model."
        )


def _check_variables(tree: Any) -> None:
    """Raises ValueError for an NNX module, or its state, with variables that are not trained."""
    pairs = zip(*flatten_with_names(tree, _is_state), strict=True)
    others = [(path_name(path), type(x).__name__) for path, x in pairs if _is_state(x)]
    if others:
        raise ValueError(
            f"Got a Flax model of which {listed(others)} are not trained: pass"
            " nnx.state(model, nnx.Param)."
        )


def _is_state(x: Any) -> bool:
    """Says whether ``x`` is such a variable, and was not left out by ``optax.masked``."""
    return _is_state_class(type(x)) and bool(jax.tree.leaves(x))


@functools.lru_cache(maxsize=4096)
def _is_state_class(cls: type) -> bool:
    names = {base.__name__ for base in cls.__mro__ if base.__module__.startswith("flax.nnx")}
    return bool(names & _STATE)
