"""What may follow what in a chain, and parts of a rule in the place of the whole."""

import inspect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.extras.argument_names import options_of
from optax_muonplus.method import (
    ArrayFunction,
    MatrixFunction,
    Orthogonalize,
    ScaleByShape,
    check_decay,
)
from optax_muonplus.transforms._descent import DecayedWeights, LearningRate
from optax_muonplus.transforms._momentum import Momentum
from optax_muonplus.transforms._steps import DualNorm


def check_order(parts: Sequence[Any]) -> None:
    """Raises ValueError for parts of a chain that undo each other.

    These are a second momentum, what follows the learning rate, a polar factor of what another one
    or a factor by shape has made, and a decay that turns parameters round.
    """
    averages = [part for part in parts if has_momentum(part)]
    if len(averages) > 1:
        raise ValueError(
            f"The chain has two momenta, in {named(averages[0])} and {named(averages[1])}: a rule"
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


def check_rule(link: Any, rule: Any, needs_polar_factor: bool = True) -> None:
    """Raises ValueError unless ``link`` is a whole rule, as ``rule`` makes one.

    Args:
      link: as given to an optimizer.
      rule: makes the optimizer's default link.
      needs_polar_factor: whether a chain must have one, if ``rule`` has.
    """
    check_is_made(link, "link")
    parts = getattr(link, "parts", None)
    if parts is None and not _is_a_part(link):
        if hasattr(link, "init") and hasattr(link, "update"):
            return
        raise ValueError(
            f"link is a rule for matrices, as {rule.__name__}(...) makes one, got {link!r}. Numbers"
            " are passed by their names: adamw=omp.transforms.AdamW(b1=0.9, b2=0.95)."
        )
    parts = (getattr(link, "average", link),) if parts is None else parts
    options = options_of(rule)
    if len(parts) == 1 and _is_a_part(parts[0]):
        missing = "is an option of the rule and not the whole of it"
    elif all(_is_a_part(x) and not has_momentum(x) for x in parts):
        missing = "has no momentum"
    elif needs_polar_factor and _are_polar(options.values()) and not any(map(_may_be, parts)):
        missing = "has no polar factor"
    else:
        return
    given = [type(x).__name__ for x in parts]
    passed = {name: type(x).__name__ for name, x in options.items()}
    shown = ", ".join(f"{name}={x}(...)" for name, x in passed.items() if x in given) or "..."
    raise ValueError(
        f"link={' and '.join(given)} {missing}: a link is everything between gradient and learning"
        f" rate. Pass link={rule.__name__}({shown}), or a matrix_chain that begins with a momentum."
    )


def check_is_made(rule: Any, name: str) -> None:
    """Raises ValueError for the class of a rule, or this library's function that makes one."""
    makes_one = inspect.isfunction(rule) and _is_own(rule) and not _required(rule)
    if inspect.isclass(rule) or makes_one:
        raise ValueError(f"{name}={rule.__name__} has to be called: {name}={rule.__name__}().")


def _required(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, p in parameters if p.default is p.empty]


def has_rate(part: Any) -> bool:
    """Whether a part of a chain multiplies by a learning rate."""
    own = not isinstance(part, optax.GradientTransformation) and hasattr(part, "learning_rate")
    return isinstance(part, LearningRate) or own


def has_momentum(part: Any) -> bool:
    """Whether a part is a momentum of this library, or a rule with one."""
    return isinstance(part, Momentum) or isinstance(getattr(part, "momentum", None), Momentum)


def named(part: Any) -> str:
    """What a part of a chain is called."""
    names = {LearningRate: "scale_by_learning_rate", DecayedWeights: "add_decayed_weights"}
    return names.get(type(part), type(part).__name__)


def _is_a_part(x: Any) -> bool:
    own = isinstance(x, Momentum | MatrixFunction | DualNorm | DecayedWeights)
    return own or hasattr(x, "average") or (callable(x) and not hasattr(x, "update"))


def _are_polar(parts: Iterable[Any]) -> bool:
    return any(isinstance(x, Orthogonalize) or hasattr(x, "polar_factor") for x in parts)


def _may_be(part: Any) -> bool:
    """Whether a part is a polar factor, has one, or is something of which nothing is known."""
    return _are_polar([part]) or isinstance(part, ArrayFunction) or not _is_own(part)


def _is_own(part: Any) -> bool:
    return getattr(part, "__module__", "").startswith("optax_muonplus.")


def _comes_before_rates(part: Any) -> bool:
    """Whether a part is of this library, which makes updates and does not end them."""
    if isinstance(part, optax.GradientTransformation):
        return isinstance(part, LearningRate | DecayedWeights)
    return has_rate(part) or (_is_own(part) and not isinstance(part, ArrayFunction))


def _goes_downhill(link: Any) -> bool:
    """Whether Optax's ``link`` turns ones round, as far as this can be known."""
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
