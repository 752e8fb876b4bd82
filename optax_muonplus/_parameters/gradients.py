"""Gradients and their parameters: those that do not belong together are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._arguments import supported
from optax_muonplus._parameters.paths import Path, flatten_with_names, path_name


def check_gradients(gradients: Any, like: Any, what: str = "parameter") -> None:
    """Raises ValueError, naming the leaves, unless gradients are those of ``like``.

    A gradient has its parameter's shape: NumPy's broadcasting would stretch a (1, 6) to (4, 6)
    without a word. It is floating-point, and complex if and only if the parameter is.

    Args:
      gradients: tree of updates.
      like: parameters, or momentum buffers; leaves are matched by their paths, and those that are
        in one of the trees only are left to Optax. None if nothing is known of them.
      what: what the leaves of ``like`` are, for messages. A buffer may be complex where the
        gradient is not, since ``mu_dtype`` says so.
    """
    paths, arrays = flatten_with_names(gradients)
    known: dict[Path, Any] = dict(zip(*flatten_with_names(like), strict=True))
    wrong = []
    for path, x in zip(paths, arrays, strict=True):
        dtype = jnp.result_type(x)
        if not supported(dtype):
            wrong.append(f"{path_name(path)} is {dtype}, not floating-point of 16 bits at least")
        elif path in known:
            wrong += [f"{path_name(path)} is {fault}" for fault in _faults(x, known[path], what)]
    if wrong:
        raise ValueError(
            f"Gradients do not fit: {'; '.join(wrong)}. Each must have its parameter's shape, and"
            " be complex where that is. Call update(gradients, state, parameters) with gradients as"
            " jax.grad returns them, and leave out what is not trained."
        )


def beside_updates(updates: Any, params: Any) -> Any:
    """``params`` with None where ``updates`` are None, as beside the static parts of a model.

    Equinox's own examples pass a whole model, of which some leaves are functions.
    """

    def is_none(x: Any) -> bool:
        return x is None

    if params is None or not any(map(is_none, jax.tree.leaves(updates, is_leaf=is_none))):
        return params
    return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)


def _faults(gradient: Any, other: Any, what: str) -> list[str]:
    """What is wrong with one gradient beside its parameter or buffer."""
    shape, wanted = np.shape(gradient), np.shape(other)
    if shape != wanted:
        return [f"{shape}, its {what} {wanted}"]
    ours, theirs = jnp.iscomplexobj(gradient), jnp.iscomplexobj(other)
    if (ours and not theirs) or (theirs and not ours and what == "parameter"):
        return [f"{jnp.result_type(gradient)}, its {what} {jnp.result_type(other)}"]
    return []
