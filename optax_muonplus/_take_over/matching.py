"""Which leaf of a new state comes from which leaf of an old one."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from optax_muonplus._parameters.folding import fold_all
from optax_muonplus._parameters.paths import Path, path_name
from optax_muonplus._take_over.reading import (
    ACCUMULATED,
    ADAMW,
    BIAS_CORRECTION,
    FIRST,
    INJECTED,
    INJECTED_SCHEDULE,
    MEAN_OF_SQUARES,
    MOMENTUM,
    MULTI_STEPS,
    OPTAX_MOMENTUM,
    OPTAX_MUON,
    SCHEDULE,
    SECOND,
    Buffer,
    Count,
    Reading,
)

_AVERAGES = (MOMENTUM, OPTAX_MOMENTUM)
# Whose count is the number of updates, where the same counter is not in the old state. AdamW's and
# those of bias corrections come late, since they may have been started anew in the middle of a run.
_COUNTERS = (SCHEDULE, MULTI_STEPS, OPTAX_MUON, ADAMW, BIAS_CORRECTION, INJECTED)
_ALIKE = {INJECTED: (INJECTED_SCHEDULE,), INJECTED_SCHEDULE: (INJECTED,)}


_ABSENT = "not in the old state"
_NO_COUNT = "the old state counts no updates"


class Match(NamedTuple):
    """What becomes of a leaf of the new state.

    Attributes:
      source: path of the leaf of the old state that takes its place, None if it stays as it is.
      why: why it stays as it is.
    """

    source: Path | None
    why: str = ""


def matches(old: Reading, new: Reading) -> dict[Path, Match]:
    """For each leaf of ``new`` what becomes of it."""
    found: dict[Path, Match] = {}
    owners = collections.defaultdict(list)
    for path, buffer in new.buffers.items():
        owners[buffer.owner].append(path)
    for owner, paths in owners.items():
        found |= _of_owner(old, new, owner, paths)
    for path, count in new.counts.items():
        if path not in found:
            source = _updates(old, path, count)
            found[path] = Match(source, "" if source else _NO_COUNT)
    for path, leaf in new.leaves.items():
        if path not in found:
            found[path] = _as_it_was(old, new, path, leaf)
    return found


def _of_owner(
    old: Reading, new: Reading, owner: Path, paths: list[Path]
) -> Iterator[tuple[Path, Match]]:
    """The matches of a state with buffers of parameters, and of its count."""
    kinds = {new.buffers[path].kind for path in paths}
    sources = {path: _source(old, new.buffers[path], new.leaves[path]) for path in paths}
    count = new.count_of(owner)
    if kinds == {FIRST, SECOND}:
        yield from _adamw(old, new, sources, count)
        return
    if ACCUMULATED in kinds:
        yield from _accumulated(old, sources, owner)
        return
    yield from _or_anew(sources)
    if count and new.counts[count].role in (OPTAX_MUON, BIAS_CORRECTION):
        kept = [source for source in sources.values() if source]
        own = [old.count_of(old.buffers[source].owner) for source in kept]
        number = next(filter(None, own), None) or _updates(old, count, new.counts[count])
        if kept and number:
            yield count, Match(number)
        else:
            yield count, Match(None, _NO_COUNT if kept else _ABSENT)


def _source(old: Reading, buffer: Buffer, leaf: Any) -> Path | None:
    """The leaf of the old state that is what ``buffer`` is."""
    kinds = _AVERAGES if buffer.kind in _AVERAGES else (buffer.kind,)
    found = old.buffers_of(buffer.parameter, *kinds)
    if buffer.kind == MEAN_OF_SQUARES:  # NorMuon's has one number a row, AdaMuon's one an element
        found = [path for path in found if np.shape(old.leaves[path]) == np.shape(leaf)]
    if not found and buffer.kind in _AVERAGES:
        found = old.buffers_of(buffer.parameter, FIRST)
    if len(found) > 1:
        raise ValueError(
            f"The old state has several arrays that are the {buffer.kind} of"
            f" {path_name(buffer.parameter)}: {', '.join(map(path_name, found))}. Pass the part of"
            " the state that holds the one you mean."
        )
    return found[0] if found else None


def _or_anew(sources: dict[Path, Path | None]) -> Iterator[tuple[Path, Match]]:
    for path, source in sources.items():
        yield path, Match(source, "" if source else _ABSENT)


def _adamw(
    old: Reading, new: Reading, sources: dict[Path, Path | None], count: Path | None
) -> Iterator[tuple[Path, Match]]:
    """All moments of a group and their one count, or none of them.

    By the old count a second moment that starts at zero would make steps several times too long;
    and where a gradient is zero, as that of a token outside of the batch, a first moment that is
    kept would be divided by epsilon.
    """
    missing = {new.buffers[path].parameter for path, source in sources.items() if not source}
    counts = {old.count_of(old.buffers[s].owner) for s in sources.values() if s} - {None}
    _agreed(old, sorted(filter(None, counts)), ADAMW)
    why = ""
    if missing:
        names = sorted(name for name, _ in fold_all((path_name(p), None) for p in missing))
        shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        why = f"no second moment of {shown}; the group has one count"
    elif count and not counts:
        why = "AdamW's count is not in the old state"
    for path, source in sources.items():
        yield path, Match(None if why else source, why)
    if count:
        yield count, Match(None if why else min(filter(None, counts)), why)


def _accumulated(
    old: Reading, sources: dict[Path, Path | None], owner: Path
) -> Iterator[tuple[Path, Match]]:
    """Gradients of a step that is not complete, all of them with their number or none."""
    kept = [old.buffers[source].owner for source in sources.values() if source]
    number = (*kept[0], "mini_step") if kept else None
    complete = len(kept) == len(sources) and number in old.leaves
    why = "" if complete else _ABSENT
    for path, source in sources.items():
        yield path, Match(source if complete else None, why)
    yield (*owner, "mini_step"), Match(number if complete else None, why)


def _updates(old: Reading, path: Path, count: Count) -> Path | None:
    """The leaf of the old state that counts what ``count`` counts: the nearest of its kind."""
    alike = [(p, c) for p, c in old.counts.items() if c.role == count.role]
    nearest = [
        [p for p, _ in alike if p == path],
        [p for p, c in alike if c.group == count.group],
        [p for p, _ in alike],
    ]
    for role in (*_ALIKE.get(count.role, ()), *_COUNTERS):
        nearest.append([p for p, c in old.counts.items() if c.role == role])
    found = next(filter(None, nearest), [])
    _agreed(old, found, count.role)
    return found[0] if found else None


def _agreed(old: Reading, paths: Iterable[Path], what: str) -> None:
    """Raises ValueError if these counts are known and differ."""
    counts = {path: value for path in paths if (value := known(old.leaves[path])) is not None}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{path_name(path)} is {value}" for path, value in counts.items())
        raise ValueError(
            f"The counts of the old state that could be the count of {what} differ: {shown}. Pass"
            " the part of the state that holds the one you mean, or set them to the same number."
        )


def known(count: Any) -> int | None:
    """The number in an array, None while it is traced."""
    return None if isinstance(count, jax.core.Tracer) else int(count)


def _as_it_was(old: Reading, new: Reading, path: Path, leaf: Any) -> Match:
    """Of other leaves: those of the same wrapper in the same place."""
    if path in new.settings:
        return Match(None, "")
    there = path in old.leaves and path not in old.buffers
    if there and np.shape(old.leaves[path]) == np.shape(leaf):
        return Match(path)
    return Match(None, _ABSENT)
