"""Links with a learning rate, and what may not stand before one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.method import ArrayFunction


class DecayedWeights(optax.GradientTransformation):
    """What ``optax_muonplus.transforms.add_decayed_weights`` returns."""

    is_zero: bool  # the decay is zero, as a Python number
    weight_decay: optax.ScalarOrSchedule
    name: str  # the argument, as messages call it


class LearningRate(optax.GradientTransformation):
    """What ``optax_muonplus.transforms.scale_by_learning_rate`` returns."""

    learning_rate: optax.ScalarOrSchedule


def check_downhill(links: Sequence[Any]) -> None:
    """Raises ValueError for a transformation of Optax that goes downhill before a learning rate.

    That is asked of it at init, with gradients of ones: ``optax.adam(0.1)`` does, and
    ``optax.scale_by_adam()`` does not. ``optax.scale(-1)`` is left alone, which asks for ascent.
    """
    for i, link in enumerate(links):
        rate = next((x for x in links[i + 1 :] if has_rate(x)), None)
        if rate is not None and _goes_downhill(link):
            raise ValueError(
                f"A link before {named(rate)} goes downhill already, as optax.adam(0.1) does: with"
                " the learning rate that follows it would go uphill. Pass what has no learning rate"
                " yet, such as optax.scale_by_adam() or omp.scale_by_muonplus()."
            )


def has_rate(part: Any) -> bool:
    """Tells whether a part of a chain multiplies by a learning rate."""
    own = not isinstance(part, optax.GradientTransformation) and hasattr(part, "learning_rate")
    return isinstance(part, LearningRate) or own


def named(part: Any) -> str:
    """Returns the name of a part for messages."""
    names = {LearningRate: "scale_by_learning_rate", DecayedWeights: "add_decayed_weights"}
    return names.get(type(part), type(part).__name__)


def is_own(part: Any) -> bool:
    return getattr(part, "__module__", "").startswith("optax_muonplus.")


def comes_before_rates(part: Any) -> bool:
    """Tells whether a part is of this library, and makes updates but does not end them."""
    if isinstance(part, optax.GradientTransformation):
        return isinstance(part, LearningRate | DecayedWeights)
    return has_rate(part) or (is_own(part) and not isinstance(part, ArrayFunction))


def _goes_downhill(link: Any) -> bool:
    """Tells whether Optax's ``link`` turns ones round, as far as this can be known."""
    if not isinstance(link, optax.GradientTransformation) or comes_before_rates(link):
        return False
    if not str(getattr(link.update, "__module__", "")).startswith("optax"):
        return False
    try:
        with jax.ensure_compile_time_eval():
            ones = {"w": jnp.ones((2, 2))}
            link = optax.with_extra_args_support(link)
            (made,) = jax.tree.leaves(link.update(ones, link.init(ones), ones)[0])
    except Exception:  # it asks for other trees or arguments, and nothing is known of it
        return False
    if isinstance(made, jax.core.Tracer):
        return False
    mean = float(np.real(np.asarray(made)).mean())
    return mean < 0 and mean != -1
