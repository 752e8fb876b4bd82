"""Finds the leaf of an old state that each leaf of a new one comes from, by paths alone.

A tree that was read from disk without its optimizer is dicts and lists with the names of the
fields, and so says as much as the state itself.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._parameters import Path, flatten_tree, fold_all, path_name

# What leaves are, in the words of the report.
MOMENTUM, FIRST, SECOND = "momentum", "first moment", "second moment"
SQUARES = "running mean of squares"
BUFFERS = (MOMENTUM, FIRST, SECOND, SQUARES)
UPDATES, ADAMW, INJECTED = "count", "AdamW's count", "injected count"
COUNTS = (UPDATES, ADAMW, INJECTED)
SETTING, OTHER = "setting", "state of a wrapper"

# What stands next to a count of updates; the counts of other states have other meanings.
_COUNTED = (set(), {"mu"}, {"mu", "ns_coeffs"}, {"momentum"})
_RECORD = {"inner", "values", "names"}
_ABSENT = "not in the old state"


class Leaf(NamedTuple):
    """An array of a state."""

    value: Any
    what: str  # one of the words above
    name: str  # path of its parameter, or of its part of the state
    owner: Path  # of the state that it is a field of


class Source(NamedTuple):
    """The path of the leaf that takes a place in the new state, or why there is none."""

    path: Path | None
    why: str = ""


Leaves = dict[Path, Leaf]
Replace = Callable[[Mapping[Path, Any]], Any]


def leaves_of(state: Any, parameters: Collection[Path]) -> tuple[Leaves, Replace]:
    """Tells what the leaves of a state are; ``parameters`` are the paths of the parameters.

    The second result makes a tree of the state's structure with some arrays replaced.
    """
    is_hole = lambda x: x is None or isinstance(x, optax.MaskedNode)  # noqa: E731
    raw, values, unflatten = flatten_tree(state, is_leaf=is_hole)
    paths = [parameter_path(path) for path in raw]
    fields = collections.defaultdict(set)  # names below a node, those of empty fields too
    for path in paths:
        for i, name in enumerate(path):
            fields[path[:i]].add(name)

    def replace(new: Mapping[Path, Any]) -> Any:
        return unflatten(new.get(p, x) for p, x in zip(paths, values, strict=True))

    pairs = zip(paths, values, strict=True)
    return {p: _leaf(p, x, parameters, fields) for p, x in pairs if not is_hole(x)}, replace


def parameter_path(path: Path) -> Path:
    """Removes the last ``value``, which a Flax Variable has on disk and not in memory."""
    return path[:-1] if path[-1:] == ("value",) else path


def _leaf(
    path: Path, value: Any, parameters: Collection[Path], fields: Mapping[Path, set[str]]
) -> Leaf:
    for i, field in enumerate(path):
        what = _buffer(field, fields[path[:i]])
        if what and path[i + 1 :] in parameters:
            return Leaf(value, what, path_name(path[i + 1 :]), path[:i])
    owner = path[:-1]
    if what := _count(path, value, fields[owner] - {"count"}):
        return Leaf(value, what, path_name(owner), owner)
    recorded = any(fields[path[:i]] >= _RECORD and path[i] != "inner" for i in range(len(path)))
    is_setting = recorded or "hyperparams" in path or path[-1:] == ("ns_coeffs",)
    return Leaf(value, SETTING if is_setting else OTHER, path_name(path), owner)


def _buffer(field: str, siblings: set[str]) -> str | None:
    """Tells what a field with a tree of parameters is, by the other fields of its state."""
    is_adamw = siblings >= {"count", "mu", "nu"}
    if field == "mu":
        return FIRST if is_adamw else MOMENTUM
    if field == "nu":
        return SECOND if is_adamw else SQUARES if "momentum" in siblings else None
    return None


def _count(path: Path, value: Any, siblings: set[str]) -> str | None:
    """Tells whose number of updates a leaf is, None for one that is not."""
    if path[-1:] not in (("count",), ("gradient_step",)) or np.shape(value):
        return None
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        return None
    if "hyperparams" in siblings or "hyperparams_states" in path:
        return INJECTED
    if siblings >= {"mu", "nu"}:
        return ADAMW
    is_known = path[-1] == "gradient_step" or siblings >= _RECORD or siblings in _COUNTED
    return UPDATES if is_known else None


def sources(old: Leaves, new: Leaves) -> dict[Path, Source]:
    """Finds where each leaf of ``new`` comes from, settings excepted."""
    found = _of_buffers(old, new)
    for path, leaf in new.items():
        if leaf.what in COUNTS:
            found[path] = _of_count(old, new, path, found)
        elif leaf.what == OTHER:  # only where both have it in the same place
            there = path in old and old[path].what == OTHER
            fits = there and np.shape(old[path].value) == np.shape(leaf.value)
            found[path] = Source(path) if fits else Source(None, _ABSENT)
    return {path: found[path] for path in new if path in found}


def _of_buffers(old: Leaves, new: Leaves) -> dict[Path, Source]:
    """Finds momentum, or AdamW's first moment for it; and AdamW's moments, all of them or none.

    AdamW's group has one count. With it, a second moment that starts at zero would make steps
    several times too long; and where a gradient is zero, as that of a token outside of the batch,
    a first moment that is kept would be divided by epsilon.
    """
    have = collections.defaultdict(list)
    for path, leaf in old.items():
        have[leaf.what, leaf.name].append(path)
    found, missing = {}, collections.defaultdict(list)
    buffers = {path: leaf for path, leaf in new.items() if leaf.what in BUFFERS}
    for path, (value, what, name, owner) in buffers.items():
        paths = have[what, name]
        if what == SQUARES:  # NorMuon has one number a row, AdaMuon one an element
            paths = [p for p in paths if np.shape(old[p].value) == np.shape(value)]
        elif what == MOMENTUM and not paths:
            paths = have[FIRST, name]
        if len(paths) > 1:
            raise ValueError(
                f"The old state has several arrays that are the {what} of {name}:"
                f" {', '.join(map(path_name, paths))}. Pass the part of the state that holds the"
                " one you mean."
            )
        found[path] = Source(paths[0]) if paths else Source(None, _ABSENT)
        if what == SECOND and not paths:
            missing[owner].append(name)
    for path, leaf in buffers.items():
        if names := missing.get(leaf.owner):
            why = f"no second moment of {listed(sorted(names), 2)}; the group has one count"
            found[path] = Source(None, why)
    return found


def _of_count(old: Leaves, new: Leaves, path: Path, found: Mapping[Path, Source]) -> Source:
    """Finds the count of AdamW's moments that were kept, or else the number of updates."""
    leaf = new[path]
    own = [found[p] for p, x in new.items() if x.what in BUFFERS and x.owner == leaf.owner]
    owners = {old[source.path].owner for source in own if source.path}
    if own and not owners:
        return own[0]
    counts = {p: x for p, x in old.items() if x.what in COUNTS}
    if leaf.what == ADAMW and owners:
        ranked = [[p for p, x in counts.items() if x.owner in owners]]
    else:
        # AdamW's group may have started anew in the middle of the run, and inject_hyperparams
        # around MultiSteps counts batches.
        order = (leaf.what, UPDATES, ADAMW, INJECTED)
        ranked = [[p for p, x in counts.items() if x.what == what] for what in order]
    candidates = next(filter(None, ranked), [])
    numbers = {path_name(p): n for p in candidates if (n := known(old[p].value)) is not None}
    if len(set(numbers.values())) > 1:
        shown = ", ".join(f"{name} is {number}" for name, number in numbers.items())
        raise ValueError(
            f"Counts of the old state differ, and each could be that of {path_name(path)} in the"
            f" new state: {shown}. Pass the part of the state that holds the one you mean, or set"
            " them to the same number."
        )
    return Source(candidates[0]) if candidates else Source(None, "the old state counts no updates")


def known(number: Any) -> int | None:
    """Returns the number in an array, None while it is traced."""
    return None if isinstance(number, jax.core.Tracer) else int(number)


def listed(names: Iterable[str], most: int = 6) -> str:
    """Joins names for a message; those that differ in numbers only become one."""
    shown = [name for name, _ in fold_all((name, None) for name in names)]
    return ", ".join(shown[:most]) + (f", ... ({len(shown)})" if len(shown) > most else "")
