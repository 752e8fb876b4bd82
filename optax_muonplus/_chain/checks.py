"""Checks of parameters, gradients and states, which name the leaves that are wrong."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._chain.paths import Path, flatten_with_names, fold_all, list_paths, path_name
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._core.arguments import is_supported


def check_only_matrices(leaves: Sequence[LeafInfo]) -> None:
    others = [leaf.name for leaf in leaves if leaf.layout is None]
    if others:
        raise ValueError(
            f"Not matrices: {', '.join(others)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )


def check_inexact(paths: Sequence[Path], dtypes: Sequence[Any]) -> None:
    """Raises ValueError for parameters that are not floating-point of 16 bits at least."""
    pairs = zip(paths, dtypes, strict=True)
    wrong = [("/".join(path), f"({dtype})") for path, dtype in pairs if not is_supported(dtype)]
    if wrong:
        raise ValueError(
            f"Parameters must be floating-point, got {list_paths(wrong)}. Keep counters, keys and"
            " what is stored in 8 bits out of the parameters, or freeze them: optax.partition with"
            " optax.set_to_zero(). In Equinox pass eqx.filter(model, eqx.is_inexact_array)."
        )


def check_gradients(gradients: Any, like: Any, what: str = "parameter") -> None:
    """Raises ValueError, naming the leaves, unless gradients are those of ``like``.

    A gradient has its parameter's shape: NumPy's broadcasting would stretch a (1, 6) to (4, 6)
    without a word. It is floating-point, and complex if and only if the parameter is; a momentum
    buffer may be complex where the gradient is not, since ``mu_dtype`` says so. Leaves are matched
    by their paths, and those that are in one of the trees only are left to JAX and Optax.
    """
    like = gradients if like is None else like
    if jax.tree.structure(gradients) == jax.tree.structure(like):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True)
        if not any(_misfit(x, other, what) for x, other in pairs):
            return  # only a message needs names
    known = dict(zip(*flatten_with_names(like), strict=True))
    named = zip(*flatten_with_names(gradients), strict=True)
    misfits = [(path_name(path), _misfit(x, known.get(path, x), what)) for path, x in named]
    wrong = fold_all((name, f"is {misfit}") for name, misfit in misfits if misfit)
    if wrong:
        raise ValueError(
            f"Gradients do not fit: {'; '.join(map(' '.join, wrong))}. Each must have its"
            " parameter's shape, and be complex where that is. Call update(gradients, state,"
            " parameters) with gradients as jax.grad returns them. Leave out what is not trained."
        )


def _misfit(x: Any, other: Any, what: str) -> str:
    """Says why ``x`` is no gradient of ``other``; nothing if it is one."""
    dtype, is_complex = jnp.result_type(x), jnp.iscomplexobj(x)
    if not is_supported(dtype):
        return f"{dtype}, not floating-point of 16 bits at least"
    if np.shape(x) != np.shape(other):
        return f"{np.shape(x)}, its {what} {np.shape(other)}"
    if is_complex != jnp.iscomplexobj(other) and (is_complex or what == "parameter"):
        return f"{dtype}, its {what} {jnp.result_type(other)}"
    return ""


def check_no_gradient_is_none(gradients: Any, state: Any) -> None:
    """Raises ValueError, naming the leaves, for None where the state has a momentum.

    None is right for what is not trained, as Equinox has it; such leaves were None at init too.
    """
    if not any(map(_is_none, jax.tree.leaves(gradients, is_leaf=_is_none))):
        return
    paths, leaves = flatten_with_names(gradients, _is_none)
    names = [path_name(path) for path, x in zip(paths, leaves, strict=True) if x is None]
    trained = [f"/{path_name(path)}" for path in flatten_with_names(state)[0]]
    ends = {name: (f"/mu/{name}", f"/codes/{name}") for name in names}
    wrong = [(name, None) for name in names if any(x.endswith(ends[name]) for x in trained)]
    if wrong:
        raise ValueError(
            f"Gradients are None for {list_paths(wrong)}, for which the state has a momentum:"
            " pass zeros there, or leave it out of tx.init(parameters)."
        )


def mask_params_like(updates: Any, params: Any) -> Any:
    """Puts None into ``params`` where ``updates`` are None, as for the static parts of a model.

    Equinox's own examples pass a whole model, some leaves of which are functions.
    """
    if params is None or not any(map(_is_none, jax.tree.leaves(updates, is_leaf=_is_none))):
        return params
    return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=_is_none)


def check_state(old: optax.OptState, new: optax.OptState) -> None:
    """Raises ValueError unless an update keeps the structure and the shapes of its state.

    NumPy's broadcasting would stretch a running mean of another side, or of a kernel that was read
    the other way, to the shape of the matrix.
    """
    is_same = jax.tree.structure(old) == jax.tree.structure(new)
    pairs = list(zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=is_same))
    if is_same and all(jnp.shape(x) == jnp.shape(y) for x, y in pairs):
        return  # only a message needs names
    wrong = [
        (path_name(path), f"is {jnp.shape(x)}, {jnp.shape(y)} after the update")
        for path, (x, y) in zip(flatten_with_names(old)[0], pairs, strict=is_same)
        if jnp.shape(x) != jnp.shape(y)
    ]
    raise wrong_state(list_paths(wrong) if is_same else "it has other parts after an update")


def wrong_state(what: str) -> ValueError:
    """Makes the error for a state that is not of the optimizer that got it."""
    return ValueError(
        f"The state is of another optimizer, of other options, or of another reading: {what}. Make"
        " it for these, tx.init(parameters), or go on from it in the middle of a run: state, report"
        " = optax_muonplus.take_over(state, tx.init(parameters), parameters)."
    )


def _is_none(x: Any) -> bool:
    return x is None
