"""What was taken over, for a person and for a program."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus._parameters.folding import fold_all
from optax_muonplus._parameters.paths import Path, path_name
from optax_muonplus._parameters.tables import aligned
from optax_muonplus._take_over.matching import Match, known
from optax_muonplus._take_over.reading import (
    ACCUMULATED,
    FIRST,
    MEAN_OF_SQUARES,
    MOMENTUM,
    OPTAX_MOMENTUM,
    SECOND,
    Reading,
)

Outcome = Literal["kept", "started anew", "not used"]
_HEADER = ("name", "state", "outcome", "from, or why")
_OWNERS = {
    MOMENTUM: "optax_muonplus",
    OPTAX_MOMENTUM: "optax.contrib.muon",
    FIRST: "AdamW",
    SECOND: "AdamW",
    MEAN_OF_SQUARES: "NorMuon or AdaMuon",
    ACCUMULATED: "MultiSteps",
}


class Entry(NamedTuple):
    """What became of one array.

    Attributes:
      name: path of the parameter that it belongs to; of a count, whose it is.
      state: what it is.
      outcome: ``"kept"``, ``"started anew"``, or ``"not used"`` for one of the old state that has
        no place in the new one.
      note: where it comes from, or why it was not kept.
    """

    name: str
    state: str
    outcome: Outcome
    note: str


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
        """As in ``("up/kernel: momentum", ...)``."""
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
        """The table; paths that differ in numbers only share a line."""
        states: dict[tuple[str, str, str], list[str]] = {}
        for entry in self.entries:
            key = entry.name, entry.outcome, entry.note
            states.setdefault(key, []).append(entry.state)
        together = [
            (name, (" and ".join(have).replace("moment and", "and"), outcome, note))
            for (name, outcome, note), have in states.items()
        ]
        rows: list[tuple[str, ...]] = [(name, *rest) for name, rest in fold_all(together)]
        last = "Learning rates and other settings are those of the new optimizer."
        return "\n".join([*aligned([_HEADER, *rows]), last])

    def _with(self, outcome: Outcome) -> tuple[str, ...]:
        found = (entry for entry in self.entries if entry.outcome == outcome)
        return tuple(f"{entry.name}: {entry.state}" for entry in found)


def entries(old: Reading, new: Reading, found: dict[Path, Match]) -> Iterator[Entry]:
    """What became of each array, settings excepted: those of ``new`` in order, then of ``old``."""
    for path, leaf in new.leaves.items():
        if path in new.settings:
            continue
        source, why = found[path]
        if source is None:
            yield Entry(*_named(new, path), "started anew", why)
        else:
            yield Entry(*_named(new, path), "kept", _origin(old, new, source, path, leaf))
    used = {match.source for match in found.values()}
    for path, buffer in old.buffers.items():
        if path not in used:
            yield Entry(*_named(old, path), "not used", f"of {_OWNERS[buffer.kind]}")


def _named(state: Reading, path: Path) -> tuple[str, str]:
    """Whose a leaf is, and what it is."""
    if buffer := state.buffers.get(path):
        kind = MOMENTUM if buffer.kind == OPTAX_MOMENTUM else buffer.kind
        return path_name(buffer.parameter), kind
    if count := state.counts.get(path):
        return f"({', '.join(filter(None, (count.role, count.group)))})", "count"
    return f"({path_name(path)})", "state of a wrapper"


def _origin(old: Reading, new: Reading, source: Path, path: Path, leaf: Any) -> str:
    """Where a leaf comes from, and what was changed."""
    value = old.leaves[source]
    if source in old.counts:
        number = known(value)
        return "" if number is None else f"at {number:,}"
    if source not in old.buffers:
        return ""
    note = _OWNERS[old.buffers[source].kind]
    if new.buffers[path].kind == MOMENTUM and old.buffers[source].kind == FIRST:
        note += "'s first moment"
    dtype = jnp.result_type(value)
    return note if dtype == leaf.dtype else f"{note}, {dtype} to {leaf.dtype}"
