"""Muon: Muon+ without the normalization."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import optax

from optax_muonplus._optimizers.muon_plus import muonplus

P = ParamSpec("P")
T = TypeVar("T")


def _like(
    function: Callable[P, T], **defaults: Any
) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Gives another function the arguments of ``function``, for people, editors and type checkers.

    Args:
      function: the arguments are written out there.
      **defaults: other default values.
    """
    signature = inspect.signature(function)
    changed = [
        p.replace(default=defaults.get(name, p.default)) for name, p in signature.parameters.items()
    ]

    def decorate(other: Callable[..., T]) -> Callable[P, T]:
        # For help() and optax.inject_hyperparams, which read arguments and defaults off it.
        other.__signature__ = signature.replace(parameters=changed)  # ty: ignore[missing-attribute]
        return other

    return decorate


@_like(muonplus, norm="none")
def muon(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """Muon: :func:`muonplus` with ``norm="none"`` by default, and every other argument the same.

    To get ``optax.contrib.muon``'s update rather than the Muon+ paper's baseline, add
    ``shape_scale="max", bias_correction=True, adam_nesterov=True``.

    Source: Jordan et al., *Muon*, https://kellerjordan.github.io/posts/muon/ (2024).
    """
    kwargs.setdefault("norm", "none")
    return muonplus(*args, **kwargs)
