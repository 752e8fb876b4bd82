"""Links with a learning rate or a decay."""

from typing import Any

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
