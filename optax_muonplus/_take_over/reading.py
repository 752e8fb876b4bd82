"""What the leaves of a state are, told by their paths alone.

A tree that was read from disk without its optimizer is dicts and lists with the names of the
fields, and so says as much as the state itself.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from optax.tree_utils import NamedTupleKey

from optax_muonplus._parameters.paths import Path, flatten_tree

# Of a parameter, in the words of the report.
MOMENTUM = "momentum"
OPTAX_MOMENTUM = "momentum of optax.contrib.muon"
FIRST, SECOND = "first moment", "second moment"
MEAN_OF_SQUARES = "running mean of squares"
ACCUMULATED = "accumulated gradient"

# Of an optimizer.
SCHEDULE, INJECTED_SCHEDULE, INJECTED = "schedule", "injected schedule", "inject_hyperparams"
ADAMW, OPTAX_MUON, BIAS_CORRECTION = "AdamW", "optax.contrib.muon", "bias correction"
MULTI_STEPS, RECORDER, MANO = "MultiSteps", "recorder", "Mano"

# States that have a `mu`, an average of gradients; a tree from disk has no names of classes.
_WITH_MU = ("ScaleByAdamState", "MuonState", "MomentumState")
_RECORD = {"inner", "values", "names"}


class Buffer(NamedTuple):
    """An array of a parameter's own.

    Attributes:
      kind: what it is, one of the words above.
      parameter: path of the parameter.
      owner: path of the state that it is a field of.
    """

    kind: str
    parameter: Path
    owner: Path


class Count(NamedTuple):
    """A number of updates.

    Attributes:
      role: who counts, one of the words above.
      group: label of the group of ``optax.partition`` that it is in; empty outside of one.
      owner: path of the state that it is a field of.
    """

    role: str
    group: str
    owner: Path


class Reading(NamedTuple):
    """A state, flattened.

    Attributes:
      leaves: its leaves by path, in order.
      buffers: what some of them are.
      by_parameter: paths of these by kind and parameter.
      counts: what some others are.
      settings: paths of hyperparameters, and of records.
      unflatten: from one value for each leaf to a tree of this structure.
    """

    leaves: dict[Path, Any]
    buffers: dict[Path, Buffer]
    by_parameter: dict[tuple[str, Path], list[Path]]
    counts: dict[Path, Count]
    settings: list[Path]
    unflatten: Callable[[Iterable[Any]], Any]

    def buffers_of(self, parameter: Path, *kinds: str) -> list[Path]:
        """The paths of a parameter's arrays of these kinds."""
        return [path for kind in kinds for path in self.by_parameter.get((kind, parameter), [])]

    def count_of(self, owner: Path) -> Path | None:
        """The path of the count of a state."""
        return next((path for path, count in self.counts.items() if count.owner == owner), None)


def read(state: Any, parameters: Collection[Path]) -> Reading:
    """What the leaves of ``state`` are; ``parameters`` are the paths of the parameters."""
    paths, values, unflatten = flatten_tree(state)
    fields = _fields(state)
    leaves, buffers, counts, settings = {}, {}, {}, []
    by_parameter: dict[tuple[str, Path], list[Path]] = {}
    for path, value in zip(paths, values, strict=True):
        if buffer := _buffer(path, parameters, fields):
            buffers[path] = buffer
            by_parameter.setdefault((buffer.kind, buffer.parameter), []).append(path)
        else:
            *_, path = _names_of(path)
            if count := _count(path, value, fields):
                counts[path] = count
            elif _is_setting(path, fields):
                settings.append(path)
        leaves[path] = value
    return Reading(leaves, buffers, by_parameter, counts, settings, unflatten)


def unknown_states(state: Any) -> list[str]:
    """Names of the classes in ``state`` whose ``mu`` is not known to be an average of gradients."""
    owners = (path[-1] for path, _ in optax.tree.get_all_with_path(state, "mu"))
    names = {key.tuple_name for key in owners if isinstance(key, NamedTupleKey)}
    return sorted(names.difference(_WITH_MU))


def _fields(state: Any) -> dict[Path, set[str]]:
    """By path of a node the names below it, those of empty fields too."""
    paths, _, _ = flatten_tree(state, is_leaf=_is_hole)
    fields: dict[Path, set[str]] = {}
    for path in paths:
        for i, name in enumerate(path):
            fields.setdefault(path[:i], set()).add(name)
    return fields


def _is_hole(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _buffer(
    path: Path, parameters: Collection[Path], fields: dict[Path, set[str]]
) -> Buffer | None:
    for i, field in enumerate(path):
        if field not in ("mu", "nu", "acc_grads"):
            continue
        beside = fields[path[:i]]
        for parameter in _names_of(path[i + 1 :]):
            kind = _kind(field, beside)
            if parameter in parameters and kind:
                return Buffer(kind, parameter, path[:i])
    return None


def _names_of(path: Path) -> Iterator[Path]:
    """A path, and without the last ``value`` that a tree of Flax Variables has on disk."""
    yield path
    if path[-1:] == ("value",):
        yield path[:-1]


def _kind(field: str, beside: set[str]) -> str | None:
    """What a field with a tree of parameters is, beside the other fields of its state."""
    if field == "acc_grads":
        return ACCUMULATED
    if field == "nu":
        return SECOND if "mu" in beside else MEAN_OF_SQUARES if "momentum" in beside else None
    if "ns_coeffs" in beside:
        return OPTAX_MOMENTUM
    return FIRST if "nu" in beside else MOMENTUM


def _count(path: Path, value: Any, fields: dict[Path, set[str]]) -> Count | None:
    if path[-1:] not in (("count",), ("gradient_step",)) or np.shape(value):
        return None
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        return None
    owner = path[:-1]
    role = _role(path, fields[owner] - {"count"})
    groups = [label for name, label in itertools.pairwise(path) if name == "inner_states"]
    return Count(role, groups[-1] if groups else "", owner) if role else None


def _role(path: Path, beside: set[str]) -> str | None:
    """Who counts, by the other fields of the state."""
    if path[-1] == "gradient_step":
        return MULTI_STEPS
    if not beside:
        return INJECTED_SCHEDULE if "hyperparams_states" in path else SCHEDULE
    if "hyperparams" in beside:
        return INJECTED
    if beside >= _RECORD:
        return RECORDER
    by_fields = {
        frozenset({"mu", "nu"}): ADAMW,
        frozenset({"mu", "ns_coeffs"}): OPTAX_MUON,
        frozenset({"mu"}): BIAS_CORRECTION,
        frozenset({"momentum"}): MANO,
    }
    return by_fields.get(frozenset(beside))


def _is_setting(path: Path, fields: dict[Path, set[str]]) -> bool:
    if "hyperparams" in path or path[-1:] == ("ns_coeffs",):
        return True
    owners = (path[:i] for i, name in enumerate(path) if name in ("step", "values", "names"))
    return any(fields[owner] >= _RECORD for owner in owners)
