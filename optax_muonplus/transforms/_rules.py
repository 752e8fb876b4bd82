"""Parts of a rule in the place of the whole."""

import inspect
from collections.abc import Iterable
from typing import Any

from optax_muonplus.frame import (
    DecayedWeights,
    DualNorm,
    Momentum,
    MomentumTransformation,
    is_own,
)
from optax_muonplus.method import ArrayFunction, MatrixFunction, Orthogonalize
from optax_muonplus.transforms._order import has_momentum


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
    if parts is None:
        parts = (link.momentum if isinstance(link, MomentumTransformation) else link,)
    parameters = inspect.signature(rule).parameters.items()
    options = {name: p.default for name, p in parameters if p.default is not p.empty}
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
    makes_one = inspect.isfunction(rule) and is_own(rule) and not _required(rule)
    if inspect.isclass(rule) or makes_one:
        raise ValueError(f"{name}={rule.__name__} has to be called: {name}={rule.__name__}().")


def _required(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, p in parameters if p.default is p.empty]


def _is_a_part(x: Any) -> bool:
    kinds = Momentum | MomentumTransformation | MatrixFunction | DualNorm | DecayedWeights
    return isinstance(x, kinds) or (callable(x) and not hasattr(x, "update"))


def _are_polar(parts: Iterable[Any]) -> bool:
    return any(isinstance(x, Orthogonalize) or hasattr(x, "polar_factor") for x in parts)


def _may_be(part: Any) -> bool:
    """Tells whether a part is a polar factor, has one, or is unknown to the library."""
    return _are_polar([part]) or isinstance(part, ArrayFunction) or not is_own(part)
