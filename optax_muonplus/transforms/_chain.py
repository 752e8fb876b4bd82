"""Links, one after the other, which are told what each matrix is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import optax

from optax_muonplus.frame import LeafInfo
from optax_muonplus.method import MatrixFunction, narrowed
from optax_muonplus.transforms._apply import Run
from optax_muonplus.transforms._momentum import Momentum
from optax_muonplus.transforms._order import check_downhill
from optax_muonplus.transforms._steps import DualNorm, Steps


class Link(Protocol):
    """A link of a chain with a state of its own, which is told what each matrix is."""

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        """Returns the state before the first update.

        Args:
          params: parameters.
          leaves: one record for each of their leaves, all matrices.
        """
        ...

    def update(
        self, updates: optax.Updates, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates and the new state.

        Args:
          updates: of the link before, not rounded to the dtype of the gradients.
          state: before the update.
          params: parameters, or None.
          leaves: one record for each leaf of ``updates``, all matrices.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Links, one after the other.

    Attributes:
      links: in order; transformations of Optax are told nothing of matrices.
      n_matrix_links: how many links there are up to the last one that is told of matrices.
    """

    links: tuple[Any, ...]
    n_matrix_links: int

    @classmethod
    def of(cls, parts: Sequence[Any], run: Run) -> "Chain":
        """Returns the chain of ``parts``, with one link for a momentum and its functions."""
        links = _joined(parts, run)
        numbers = [i for i, link in enumerate(links, 1) if not _is_of_optax(link)]
        for i in numbers[:-1]:
            if isinstance(links[i - 1], Steps):
                links[i - 1] = dataclasses.replace(links[i - 1], rounds=False)
        return cls(tuple(links), max(numbers, default=0))

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        """Returns the state of the only link, or a tuple of those of all."""
        check_downhill(self.links)
        states = tuple(
            link.init(params) if _is_of_optax(link) else link.init(params, leaves)
            for link in self.links
        )
        return states[0] if len(states) == 1 else states

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        leaves: Sequence[LeafInfo],
        extra_args: Mapping[str, Any],
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates of the last link, and the new state."""
        made, new = updates, []
        states = (state,) if len(self.links) == 1 else state
        for i, (link, old) in enumerate(zip(self.links, states, strict=True), 1):
            if _is_of_optax(link):
                link = optax.with_extra_args_support(link)
                made, now = link.update(made, old, params, **extra_args)
            else:
                made, now = link.update(made, old, params, leaves)
            made = _like(updates, made) if i == self.n_matrix_links else made
            new.append(now)
        return made, new[0] if len(new) == 1 else tuple(new)


def _is_of_optax(link: Any) -> bool:
    return isinstance(link, optax.GradientTransformation)


def _joined(parts: Sequence[Any], run: Run) -> list[Any]:
    """Links, each a momentum and functions, functions alone, or another part."""
    links: list[Any] = []
    together: list[Any] = []
    for part in (*parts, None):
        is_step = isinstance(part, MatrixFunction | DualNorm)
        if together and not is_step:
            links.append(_link_of(together, run))
            together = []
        if is_step or isinstance(part, Momentum):
            together.append(part)
        elif part is not None:
            links.append(_told(part, run))
    return links


def _told(part: Any, run: Run) -> Any:
    """Returns a rule that applies functions itself with the chain's way to do so."""
    has_run = dataclasses.is_dataclass(part) and hasattr(part, "run")
    return dataclasses.replace(part, run=run) if has_run else part


def _link_of(parts: Sequence[Any], run: Run) -> Any:
    average = parts[0] if isinstance(parts[0], Momentum) else None
    if average is not None and len(parts) == 1:
        return optax.GradientTransformation(average.init, average.update)
    return Steps.of(average, parts[average is not None :], run=run)


def _like(gradients: optax.Updates, updates: optax.Updates) -> optax.Updates:
    """``updates`` in the dtypes of the gradients, which most links give them."""
    return jax.tree.map(
        lambda g, u: u if u.dtype == g.dtype else narrowed(u, g.dtype), gradients, updates
    )
