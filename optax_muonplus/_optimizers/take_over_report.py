"""Says what was taken over, for a person and for a program."""

import dataclasses
from typing import Literal, NamedTuple

import jax

from optax_muonplus._parameters import aligned, fold_all

Outcome = Literal["kept", "started anew", "not used"]
_HEADER = ("name", "state", "outcome", "from, or why")


class Entry(NamedTuple):
    """What became of one array."""

    name: str  # path of the parameter that it belongs to, or of the part of the state
    state: str  # what it is
    outcome: Outcome  # "not used" is one of the old state that has no place in the new one
    note: str  # where it comes from, or why it was not kept


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TakenOver:
    """What :func:`take_over` kept, started anew and did not use; ``print`` shows a table.

    It has no arrays, so that a function under ``jax.jit`` may return it.

    Attributes:
      entries: one for each array, with the fields ``name``, ``state``, ``outcome`` and ``note``.
    """

    entries: tuple[Entry, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """What the new state has from the old one, such as ``"up/kernel: momentum"``."""
        return self._with("kept")

    @property
    def started_anew(self) -> tuple[str, ...]:
        """What the new state has as it was initialised."""
        return self._with("started anew")

    @property
    def not_used(self) -> tuple[str, ...]:
        """What the old state has and the new one has no place for."""
        return self._with("not used")

    def __str__(self) -> str:
        """Returns the table; paths that differ in numbers only share a line."""
        states: dict[tuple[str, str, str], list[str]] = {}
        for name, state, outcome, note in self.entries:
            states.setdefault((name, outcome, note), []).append(state)
        together = [
            (name, (" and ".join(have).replace("moment and", "and"), outcome, note))
            for (name, outcome, note), have in states.items()
        ]
        rows: list[tuple[str, ...]] = [(name, *rest) for name, rest in fold_all(together)]
        last = "Learning rates and other settings are those of the new optimizer."
        return "\n".join([*aligned([_HEADER, *rows]), last])

    def _with(self, outcome: Outcome) -> tuple[str, ...]:
        return tuple(f"{x.name}: {x.state}" for x in self.entries if x.outcome == outcome)
