"""The learning rate in the state of an optimizer."""

from typing import Any

import jax
import numpy as np
import optax


def learning_rate(state: Any, name: str = "learning_rate") -> Any:
    """Returns the learning rate of an optimizer that ``optax.inject_hyperparams`` made.

    It is found at any depth: in ``optax.chain``, ``MultiSteps``, ``masked`` and other wrappers, in
    a Flax ``TrainState`` and in the ``opt_state`` of a ``flax.nnx.Optimizer``. With a schedule it
    is the rate of the last update; before any update, the rate of the first. It is a scalar array.

    Args:
      state: the optimizer's state, or an object that contains it.
      name: another injected number, such as ``"adam_learning_rate"``.

    Raises:
      ValueError: if the state has none, or several.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> tx = optax.inject_hyperparams(omp.muonplus)(learning_rate=0.02)
      >>> print(f"{omp.learning_rate(tx.init({'up': jnp.ones((4, 6))})):.2f}")
      0.02
    """

    def is_injected(path: Any, _: Any) -> bool:
        # A parameter may have that name, and so has the state of a schedule.
        names = jax.tree_util.keystr(path)
        return "hyperparams" in names and "hyperparams_states" not in names

    found = optax.tree.get_all_with_path(state, name, filtering=is_injected)
    if not found:
        raise ValueError(
            f"The state has no {name}. Only optax.inject_hyperparams keeps it there, if it is given"
            f" as a number or schedule: optax.inject_hyperparams(omp.muonplus)({name}=...)."
        )
    if len(found) > 1:
        places = ", ".join(jax.tree_util.keystr(path) for path, _ in found)
        raise ValueError(f"The state has several {name}, {places}: pass a part with one.")
    ((_, rate),) = found
    if isinstance(rate, int | float):
        return np.asarray(rate)
    rate = rate if isinstance(rate, jax.Array | np.ndarray) else rate[...]
    # Injection makes every number complex if a parameter is.
    return rate.real if np.iscomplexobj(rate) else rate
