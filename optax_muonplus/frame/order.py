"""The order of links in a chain."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.frame.momentum import Momentum
from optax_muonplus.method import ArrayFunction, Orthogonalize, ScaleByShape


class DecayedWeights(optax.GradientTransformation):
    """What ``optax_muonplus.transforms.add_decayed_weights`` returns."""

    is_zero: bool  # the decay is zero, as a Python number
    weight_decay: optax.ScalarOrSchedule
    name: str  # the argument, as messages call it


class LearningRate(optax.GradientTransformation):
    """What ``optax_muonplus.transforms.scale_by_learning_rate`` returns."""

    learning_rate: optax.ScalarOrSchedule


def check_decay(name: str, weight_decay: Any, learning_rate: Any) -> None:
    """Raises ValueError if a step of decay, of numbers, turns parameters round."""
    numbers = weight_decay, learning_rate
    if all(isinstance(x, int | float) for x in numbers) and weight_decay * learning_rate > 1:
        raise ValueError(
            f"{name}={weight_decay} times the learning rate {learning_rate} is more than 1, so that"
            " each update would turn the sign of every parameter. Decay is multiplied by the"
            " learning rate here; 0.1 is usual."
        )


def check_order(parts: Sequence[Any]) -> None:
    """Raises ValueError for parts of a chain that undo each other.

    These are a second momentum, what follows the learning rate, a polar factor of what another one
    or a factor by shape has made, and a decay that turns parameters round.
    """
    momenta = [part for part in parts if has_momentum(part)]
    if len(momenta) > 1:
        raise ValueError(
            f"The chain has two momenta, in {named(momenta[0])} and {named(momenta[1])}: a rule"
            " has its own, as in NorMuon(momentum=Momentum(...)), and a chain begins with one."
            " Leave one of them out; optax.trace may stand beside the other."
        )
    for part, after in itertools.pairwise(parts):
        if isinstance(after, Orthogonalize) and isinstance(part, Orthogonalize | ScaleByShape):
            raise ValueError(
                f"The chain has a polar factor right after {named(part)}, of which it leaves"
                " nothing. Leave one of them out; scale_by_shape belongs behind the polar factor."
            )
        if isinstance(part, DecayedWeights) and isinstance(after, LearningRate):
            check_decay(part.name, part.weight_decay, after.learning_rate)
    for i, part in enumerate(parts):
        after = next((x for x in parts[i + 1 :] if _comes_before_rates(x)), None)
        if has_rate(part) and after is not None:
            raise ValueError(
                f"{named(after)} comes after {named(part)}, which has a learning rate already: its"
                " updates go downhill, and what follows would turn them uphill or change their"
                " length. A chain ends with its rate. An optimizer that takes a learning_rate adds"
                " that, so that its link has none."
            )


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


def has_momentum(part: Any) -> bool:
    """Tells whether a part is a momentum of this library, or a rule with one."""
    return isinstance(part, Momentum) or isinstance(getattr(part, "momentum", None), Momentum)


def named(part: Any) -> str:
    """Returns the name of a part for messages."""
    names = {LearningRate: "scale_by_learning_rate", DecayedWeights: "add_decayed_weights"}
    return names.get(type(part), type(part).__name__)


def is_own(part: Any) -> bool:
    return getattr(part, "__module__", "").startswith("optax_muonplus.")


def _comes_before_rates(part: Any) -> bool:
    """Tells whether a part is of this library, and makes updates but does not end them."""
    if isinstance(part, optax.GradientTransformation):
        return isinstance(part, LearningRate | DecayedWeights)
    return has_rate(part) or (is_own(part) and not isinstance(part, ArrayFunction))


def _goes_downhill(link: Any) -> bool:
    """Tells whether Optax's ``link`` turns ones round, as far as this can be known."""
    if not isinstance(link, optax.GradientTransformation) or _comes_before_rates(link):
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
