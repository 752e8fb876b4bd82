"""Names that arguments have in other libraries, said where an optimizer is called with them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from optax_muonplus._arguments import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

# Of Optax, PyTorch, Levanter, MaxText and the code of Muon.
ELSEWHERE = {
    "momentum": "beta",
    "mu": "beta",
    "lr": "learning_rate",
    "muon_lr": "learning_rate",
    "adam_lr": "adam_learning_rate",
    "adamw_lr": "adam_learning_rate",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "adamw_weight_decay": "adam_weight_decay",
    "mask": "weight_decay_mask",
    "b1": "adam_b1",
    "b2": "adam_b2",
    "beta1": "adam_b1",
    "beta2": "adam_b2",
    "betas": "adam_b1",
    "epsilon": "eps",
    "muon_epsilon": "eps",
    "steps": "ns_steps",
    "backend_steps": "ns_steps",
    "newton_schulz_steps": "ns_steps",
    "coefficients": "ns_coeffs",
    "normalization": "norm",
    "dtype": "compute_dtype",
    "momentum_dtype": "mu_dtype",
    "weight_dimension_numbers": "muon_weight_dimension_numbers",
    "dimension_numbers": "muon_weight_dimension_numbers",
}


def says_names(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, whose TypeError for an unknown keyword says what it is called here."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for given in kwargs:
            if given not in names:
                raise TypeError(
                    f"{checked.__name__}() has no argument {given}{_instead(given, names)}"
                )
        return function(*args, **kwargs)

    return checked


def _instead(given: str, names: Any) -> str:
    called = ELSEWHERE.get(given, given)
    if called in names:
        return f": it is called {called} here."
    value = next((x for x in ("adamw", "others") if x in names), None)
    if called.startswith("adam_") and value:
        return f": it is in {value} here, as in {value}=omp.transforms.AdamW(b1=0.9)."
    near = did_you_mean(given, names)
    of_rule = " Options of the rule itself are in link." if "link" in names else ""
    return f".{near}" if near else f": it has {', '.join(names)}.{of_rule}"
