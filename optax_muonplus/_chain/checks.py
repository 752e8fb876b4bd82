"""Checks of parameters, gradients and states. Errors name the leaves at fault."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._core.arguments import is_supported
from optax_muonplus._leaves.paths import (
    Path,
    flatten_with_names,
    fold_all,
    is_hole,
    list_paths,
    path_name,
)
from optax_muonplus._leaves.record import LeafInfo


def check_only_matrices(leaves: Sequence[LeafInfo]) -> None:
    others = [leaf.name for leaf in leaves if leaf.layout is None]
    if others:
        raise ValueError(
            f"Not matrices: {', '.join(others)}. This transformation is for matrices only. Leave"
            " the others to AdamW, by optax_muonplus.muonplus or by optax.partition with"
            " optax_muonplus.partition_labels, or give them dimension numbers."
        )


def check_inexact(paths: Sequence[Path], dtypes: Sequence[Any]) -> None:
    """Raises ValueError for parameters that are not floating-point of at least 16 bits."""
    pairs = zip(paths, dtypes, strict=True)
    wrong = [("/".join(path), f"({dtype})") for path, dtype in pairs if not is_supported(dtype)]
    if wrong:
        raise ValueError(
            f"Parameters must be floating-point, got {list_paths(wrong)}. Keep counters, keys and"
            " 8-bit arrays out of the parameters, or freeze them: optax.partition with"
            " optax.set_to_zero(). In Equinox pass eqx.filter(model, eqx.is_inexact_array)."
        )


def check_gradients(gradients: Any, params: Any) -> None:
    """Raises ValueError, naming the leaves, unless gradients fit their parameters."""
    # Broadcasting would silently stretch a (1, 6) to (4, 6). Leaves are matched by path. JAX and
    # Optax report a leaf that only one tree has.
    params = gradients if params is None else params
    if jax.tree.structure(gradients) == jax.tree.structure(params):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(params), strict=True)
        if not any(_misfit(x, parameter) for x, parameter in pairs):
            return  # only a message needs names
    known = dict(zip(*flatten_with_names(params), strict=True))
    named = zip(*flatten_with_names(gradients), strict=True)
    misfits = [(path_name(path), _misfit(x, known.get(path, x))) for path, x in named]
    wrong = fold_all((name, f"is {misfit}") for name, misfit in misfits if misfit)
    if wrong:
        raise ValueError(
            f"Gradients do not fit: {'; '.join(map(' '.join, wrong))}. Each must have its"
            " parameter's shape, and be complex if the parameter is. Call update(gradients, state,"
            " parameters) with gradients as jax.grad returns them. Leave out what is not trained."
        )


def _misfit(x: Any, parameter: Any) -> str:
    """Returns why ``x`` cannot be the gradient of ``parameter``; empty if it can."""
    dtype = jnp.result_type(x)
    if not is_supported(dtype):
        return f"{dtype}, not floating-point of at least 16 bits"
    if np.shape(x) != np.shape(parameter):
        return f"{np.shape(x)}, its parameter {np.shape(parameter)}"
    if jnp.iscomplexobj(x) != jnp.iscomplexobj(parameter):
        return f"{dtype}, its parameter {jnp.result_type(parameter)}"
    return ""


def mask_params_like(updates: Any, params: Any) -> Any:
    """Returns ``params`` with None where ``updates`` are None, as for static parts of models."""
    if params is None or not any(map(_is_none, jax.tree.leaves(updates, is_leaf=_is_none))):
        return params
    return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=_is_none)


class StateCheck:
    """Compares a state with one that the optimizer makes, once for each structure."""

    def __init__(self) -> None:
        self._fitting: Any = None

    def __call__(
        self, state: Any, init: Callable[[Any], optax.OptState], like: Any, params: Any
    ) -> None:
        """Raises ValueError unless ``state`` has the paths and arrays of ``init(like)``."""
        # Broadcasting would stretch a running mean of the other side. Containers may differ.
        leaves, structure = jax.tree.flatten((state, like))
        found = structure, [(np.shape(x), getattr(x, "dtype", type(x))) for x in leaves]
        if found == self._fitting:
            return
        expected = jax.eval_shape(init, like)
        have, wanted = _by_path(state), _by_path(expected)
        _check_none(like, have.keys() - wanted.keys())
        unfit = {path: array_misfit(x, wanted[path]) for path, x in have.items() if path in wanted}
        wrong = [
            ("missing", [(path, None) for path in wanted if path not in have]),
            ("unknown", [(path, None) for path in have if path not in wanted]),
            ("misfit", [(path, why) for path, why in unfit.items() if why]),
        ]
        shown = "; ".join(f"{kind} {_list_few(parts)}" for kind, parts in wrong if parts)
        if wanted.keys() != {()} and type(state) is not type(expected):
            shown = f"{type(state).__name__} in place of {type(expected).__name__}"
        if shown:
            raise wrong_state(shown, params is None)
        self._fitting = found


def _by_path(state: Any) -> dict[Path, Any]:
    """Returns the arrays of a state by path, with an empty one for a part that has none."""

    def is_empty(x: Any) -> bool:
        return isinstance(x, tuple) and not x and not is_hole(x)

    pairs = zip(*flatten_with_names(state, is_empty), strict=True)
    return {path: np.zeros(0) if isinstance(x, tuple) else x for path, x in pairs}


def array_misfit(x: Any, other: Any) -> str:
    """Returns why an array of a state cannot replace another; empty if it can."""
    if np.shape(x) != np.shape(other):
        return f"({np.shape(x)} for {np.shape(other)})"
    dtypes = jnp.result_type(x), jnp.result_type(other)
    kinds = {"f" if is_supported(dtype) else getattr(dtype, "kind", dtype) for dtype in dtypes}
    if len(kinds) > 1 or (jnp.iscomplexobj(other) and not jnp.iscomplexobj(x)):
        return "({} for {})".format(*dtypes)
    return ""


def _check_none(gradients: Any, unknown: Iterable[Path]) -> None:
    """Raises ValueError for a gradient None where the state has an array."""
    pairs = zip(*flatten_with_names(gradients, _is_none), strict=True)
    nones = [path for path, x in pairs if x is None]
    wrong = [(x, None) for x in nones if any(path[len(path) - len(x) :] == x for path in unknown)]
    if wrong:
        raise ValueError(
            f"Gradients are None for {_list_few(wrong)}, for which the state has a momentum:"
            " pass zeros there, or leave it out of tx.init(parameters)."
        )


def _list_few(parts: Iterable[tuple[Path, str | None]]) -> str:
    names = list_paths((path_name(path), why) for path, why in parts)
    return textwrap.shorten(names, 400, placeholder=" ...")


def wrong_state(what: str, without_params: bool = False) -> ValueError:
    """Returns the error for a state that does not fit the optimizer, or perhaps the gradients."""
    perhaps = ""
    if without_params:
        perhaps = ", or a gradient does not have its parameter's shape (checked by"
        perhaps += " update(gradients, state, parameters))"
    return ValueError(
        "The state is of another optimizer, of other options, or of another reading of the"
        f" parameters{perhaps}: {what}. Make a new one by tx.init(parameters), or convert this one:"
        " state, report = optax_muonplus.take_over(state, tx.init(parameters), parameters)."
    )


def _is_none(x: Any) -> bool:
    return x is None
