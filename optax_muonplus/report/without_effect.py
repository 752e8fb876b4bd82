"""Which arguments of Muon+ have no effect because of others.

They are not refused: a sweep over ``norm`` or ``polar`` keeps the others as they are, and traced
values cannot be told from defaults. ``describe`` says them, and each one's documentation. It also
says where AdamW has a learning rate that is rarely meant for it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from optax_muonplus.extras.argument_names import says_names
from optax_muonplus.muonplus import muonplus
from optax_muonplus.polar import DEFAULT_EPS


class Idle(NamedTuple):
    """Arguments without effect."""

    names: tuple[str, ...]
    beside: str  # what takes their effect, as messages say it
    applies: Callable[[Mapping[str, Any]], bool]  # from all arguments to whether they have none


_ITERATION = ("ns_coeffs", "ns_steps", "eps", "preconditioning", "compute_dtype")
_OF_DECAY = ("weight_decay_mask", "cautious_weight_decay")
_SIZE = "without nesterov or adaptive: a polar factor does not see the size of its matrix"


def _sees_size(given: Mapping[str, Any]) -> bool:
    exact = not callable(given["polar"]) and _is(DEFAULT_EPS, given["eps"])
    return bool(given["nesterov"] or given["adaptive"] or not exact)


LARGE = 0.005  # a learning rate beyond what AdamW usually has
RULES = (
    Idle(_ITERATION, "beside polar='svd'", lambda given: given["polar"] == "svd"),
    Idle(_ITERATION, "beside a function as polar", lambda given: callable(given["polar"])),
    Idle(("norm_eps", "match_frobenius"), "beside norm='none'", lambda x: x["norm"] == "none"),
    Idle(("shape_scale",), "beside consistent_rms", lambda x: x["consistent_rms"] is not None),
    Idle(("nesterov", "bias_correction"), "beside beta=0", lambda x: _is(0, x["beta"])),
    Idle(("bias_correction",), _SIZE, lambda given: not _sees_size(given)),
    Idle(_OF_DECAY, "beside weight_decay=0", lambda x: _is(0, x["weight_decay"])),
)


def without_effect(given: Mapping[str, Any]) -> list[str]:
    """A line for each rule by which some of the given arguments of Muon+ have no effect.

    Arguments at their default are not said. Lines about the learning rates follow. Raises
    TypeError for a name that :func:`muonplus` does not have, as of ``describe``, and ValueError as
    it does.
    """
    signature = inspect.signature(muonplus)
    arguments: dict[str, Any] = {"learning_rate": 0.0, **given}
    _named_describe(**given)
    muonplus(**arguments)  # refuses what it would refuse
    bound = signature.bind(**arguments)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    everything = {**defaults, **bound.arguments}
    chosen = {
        name
        for name, x in bound.arguments.items()
        if x is not defaults[name] and not _is(defaults[name], x)
    }
    lines = []
    for rule in RULES:
        idle = [name for name in rule.names if name in chosen]
        if idle and rule.applies(everything):
            lines.append(f"without effect: {', '.join(idle)}, {rule.beside}")
    return [*lines, *(_of_rates(everything) if "learning_rate" in given else ())]


def _of_rates(given: Mapping[str, Any]) -> Iterator[str]:
    """A line if AdamW's learning rate follows that of the matrices, or does not follow it."""
    rate, adam = given["learning_rate"], given["adam_learning_rate"]
    large = isinstance(rate, int | float) and rate >= LARGE
    if large and adam is None and given["consistent_rms"] is None:
        yield (
            f"adam_learning_rate is not given, and AdamW has learning_rate={rate:g} too;"
            " adam_learning_rate=0.003 is usual"
        )
    if callable(rate) and isinstance(adam, int | float):
        yield f"adam_learning_rate={adam:g} stays constant beside a schedule of learning_rate"


def _of_muonplus(**_: Any) -> None:
    """Takes the arguments of Muon+, for messages that name the function that was called."""


_of_muonplus.__name__ = "describe"
_of_muonplus.__signature__ = inspect.signature(muonplus)  # ty: ignore[missing-attribute]
_named_describe = says_names()(_of_muonplus)


def _is(value: Any, given: Any) -> bool:
    """Whether ``given`` is that number, word or flag; arrays are not looked into."""
    return isinstance(given, str | bool | int | float) and given == value
