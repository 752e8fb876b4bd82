"""The links of a chain, and what they may declare."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import optax

from optax_muonplus._chain.momentum import PlainMomentum
from optax_muonplus._chain.plain import Run
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._leaves.record import LeafInfo


@runtime_checkable
class AnyLink(Protocol):
    """A link with its own state. It receives a record of each leaf; all leaves are matrices."""

    # Updates come from the link before, not rounded to the gradients' dtype. Params may be None.

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any: ...

    def update(
        self, updates: optax.Updates, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, Any]: ...


class Link:
    """A base class of links that declare more than ``init`` and ``update``.

    Attributes:
      momentum: its momentum, if any; a chain has at most one.
      polar_factor: its polar factor, if any; no other may follow.
      shape_scale: its factor by shape, or ``"none"``; a chain has at most one.
      makes_whole_steps: whether updates are whole steps downhill; it is then the last link.
    """

    makes_whole_steps: ClassVar[bool] = False

    @property
    def momentum(self) -> PlainMomentum | None:
        return None

    @property
    def polar_factor(self) -> Orthogonalize | None:
        return None

    @property
    def shape_scale(self) -> str:
        return "none"

    def with_run(self, run: Run) -> Self:
        """Returns a link that applies its functions on matrices, if any, by ``run``."""
        del run
        return self


def makes_whole_steps(link: Any) -> bool:
    return isinstance(link, Link) and link.makes_whole_steps
