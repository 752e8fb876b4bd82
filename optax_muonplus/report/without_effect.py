"""Which arguments of Muon+ have no effect because of others.

They are not refused: a sweep over ``norm`` or ``polar`` keeps the others as they are, and traced
values cannot be told from defaults. ``describe`` lists them, and their documentation says so. It
also says where AdamW has a learning rate that is rarely meant for it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from optax_muonplus.method import DEFAULT_EPS
from optax_muonplus.muonplus import muonplus


class NoEffect(NamedTuple):
    """Arguments without effect."""

    names: tuple[str, ...]
    reason: str  # why they have no effect, as the user reads it
    applies: Callable[[Mapping[str, Any]], bool]  # tells from all arguments if so


_ITERATION = ("ns_coeffs", "ns_steps", "eps", "preconditioning", "compute_dtype")
_DECAY = ("weight_decay_mask", "cautious_weight_decay")
_SIZE = "without nesterov or adaptive: a polar factor does not see the size of its matrix"
LARGE = 0.005  # a learning rate beyond what AdamW usually has, and the least of Muon's


def _sees_size(given: Mapping[str, Any]) -> bool:
    """Tells whether an update depends on the length of the momentum."""
    exact = not callable(given["polar"]) and _is(DEFAULT_EPS, given["eps"])
    return bool(given["nesterov"] or given["adaptive"] or not exact)


RULES = (
    NoEffect(_ITERATION, "beside polar='svd'", lambda given: given["polar"] == "svd"),
    NoEffect(_ITERATION, "beside a function as polar", lambda given: callable(given["polar"])),
    NoEffect(("norm_eps", "match_frobenius"), "beside norm='none'", lambda x: x["norm"] == "none"),
    NoEffect(("shape_scale",), "beside consistent_rms", lambda x: x["consistent_rms"] is not None),
    NoEffect(("nesterov", "bias_correction"), "beside beta=0", lambda x: _is(0, x["beta"])),
    NoEffect(("bias_correction",), _SIZE, lambda given: not _sees_size(given)),
    NoEffect(_DECAY, "beside weight_decay=0", lambda x: _is(0, x["weight_decay"])),
)


def all_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given arguments of Muon+, and its defaults for the others.

    Raises TypeError and ValueError where :func:`muonplus` does.
    """
    arguments: dict[str, Any] = {"learning_rate": 0.0, **given}
    muonplus(**arguments)  # refuses what it would refuse
    return {**_defaults(), **given}


def without_effect(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each rule by which some arguments have no effect, from all arguments.

    Arguments that are as by default are not listed. Lines about the learning rates follow.
    """
    defaults = _defaults()
    chosen = {
        name
        for name, x in given.items()
        if name not in defaults or (x is not defaults[name] and not _is(defaults[name], x))
    }
    for rule in RULES:
        idle = [name for name in rule.names if name in chosen]
        if idle and rule.applies(given):
            yield f"without effect: {', '.join(idle)}, {rule.reason}"
    rate, adam = given.get("learning_rate"), given["adam_learning_rate"]
    large = isinstance(rate, int | float) and rate >= LARGE and given["others"] is None
    if large and adam is None and given["consistent_rms"] is None:
        yield (
            f"adam_learning_rate is not given, and AdamW has learning_rate={rate:g} too;"
            " adam_learning_rate=0.003 is usual"
        )
    if isinstance(rate, int | float) and 0 < rate < LARGE and given["consistent_rms"] is None:
        yield (
            f"learning_rate={rate:g} is of the order of AdamW's, by which matrices hardly move."
            " Start from 0.02, or add consistent_rms=0.2"
        )
    if callable(rate) and isinstance(adam, int | float):
        yield f"adam_learning_rate={adam:g} stays constant beside a schedule of learning_rate"


def _defaults() -> dict[str, Any]:
    parameters = inspect.signature(muonplus).parameters.items()
    return {name: p.default for name, p in parameters if p.default is not p.empty}


def _is(value: Any, given: Any) -> bool:
    """Tells whether ``given`` is that number, word or flag; arrays are not looked into."""
    return isinstance(given, str | bool | int | float) and given == value
