"""Reads a state of any optimizer: the role of each array, and the parameter that it belongs to."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.frame import flatten_with_names, path_name
from optax_muonplus.trees import listed

# Roles of arrays, in the words of the report.
MOMENTUM, FIRST, SECOND = "momentum", "first moment", "second moment"
SQUARES, UNKNOWN = "running mean of squares", "momentum of an unknown kind"
ROW_NORMS = {FIRST: "first moment of row norms", SECOND: "second moment of row norms"}
BUFFERS = (MOMENTUM, FIRST, SECOND, SQUARES, UNKNOWN, *ROW_NORMS.values())
UPDATES, INJECTED, AVERAGED, ADAMW = "count", "injected count", "momentum's count", "AdamW's count"
# Schedules come first: a momentum or AdamW's group may have started anew in the middle of the run.
COUNTS = (UPDATES, INJECTED, AVERAGED, ADAMW)
MINI_STEP, SETTING, OTHER = "mini_step", "setting", "state of a wrapper"

# Roles of fields by the class of their state; a mapping replaces roles within its field. A tree
# from disk has no classes: there the first class counts whose fields it has.
_INJECT = {"count": INJECTED, "hyperparams": SETTING}
_ROLES: Mapping[str, Mapping[str, Any]] = {
    "MultiStepsState": {"mini_step": MINI_STEP, "gradient_step": UPDATES},
    "InjectStatefulHyperparamsState": {**_INJECT, "hyperparams_states": {UPDATES: INJECTED}},
    "InjectHyperparamsState": _INJECT,
    "RecordState": {"count": UPDATES, "step": SETTING, "values": SETTING, "names": SETTING},
    "MuownState": {"momentum": {}, "magnitude": OTHER, "length": OTHER, "adam": ROW_NORMS},
    "ScaleByAdamState": {"mu": FIRST, "nu": SECOND, "count": ADAMW},
    "NorMuonState": {"momentum": {}, "nu": SQUARES},
    "AdaMuonState": {"momentum": {}, "nu": SQUARES},
    "ManoState": {"momentum": {}, "count": UPDATES},
    "MuonState": {"mu": MOMENTUM, "count": AVERAGED, "ns_coeffs": SETTING},
    "MomentumState": {"mu": MOMENTUM, "count": AVERAGED},
    "MomentumState without a count": {"mu": MOMENTUM},
}
_KNOWN = (
    "Known are the states of optax_muonplus, of optax.contrib.muon, and of optax.adamw and its"
    " like, in any wrapper, or the same as a tree of arrays that a checkpoint holds."
)


class Leaf(NamedTuple):
    """An array of a state."""

    value: Any
    role: str
    name: str  # path of its parameter, or of its part of the state
    owner: str  # path of the state that it is in
    state: str  # class of that state, "" on disk


def read(what: str, state: optax.OptState, params: optax.Params) -> dict[str, Leaf]:
    """Returns a state's arrays by path, in order, or raises ValueError if it is no known state."""
    pairs = zip(jax.tree.leaves_with_path(params), flatten_with_names(params)[0], strict=True)
    names = {_name(keys): path_name(path) for (keys, _), path in pairs}
    leaves = {}
    for path, leaf in _walk(state, (), "", {}):
        name = names.get(leaf.name) if leaf.role in BUFFERS else path
        if leaf.role in COUNTS:
            name = (leaf.owner or "(root)") if _is_whole_number(leaf.value) else None
        leaves[path] = leaf._replace(role=leaf.role if name else OTHER, name=name or path)
    if unknown := sorted({leaf.state for leaf in leaves.values() if leaf.role == UNKNOWN}):
        raise ValueError(
            f"{what} has a momentum in {', '.join(unknown)}, which may not be the average of"
            f" gradients that it is here. {_KNOWN} Pass the part of the state that is one of them."
        )
    if not any(leaf.role in BUFFERS for leaf in leaves.values()):
        has, wanted = (listed((name, None) for name in x) for x in (leaves, sorted(names.values())))
        raise ValueError(
            f"Got a {type(state).__name__} as {what}, in which no momentum of these parameters is"
            f" found. It has {has or 'no arrays'}; params are {wanted}. {_KNOWN} Pass the"
            " parameters as the optimizer's init was given them."
        )
    if gone := [(path, None) for path, leaf in leaves.items() if _is_gone(leaf.value)]:
        raise ValueError(
            f"{what} must have arrays, but these are shapes or were donated: {listed(gone)}. Take"
            " over before the old state is donated, and pass tx.init(params), not its shapes;"
            " under jax.jit that is free."
        )
    return leaves


def _walk(
    node: Any, keys: Any, state: str, replaced: Mapping[str, str]
) -> Iterator[tuple[str, Leaf]]:
    """Yields paths and arrays in order; names are the paths below the field with the role."""
    roles = _roles_of(node, on_disk=not state)
    state = type(node).__name__ if hasattr(node, "_fields") else state
    for key, child in jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node):
        role = roles.get(_name(key), {}) if key else OTHER
        if isinstance(role, str):
            for rest, x in jax.tree.leaves_with_path(child):
                leaf = Leaf(x, replaced.get(role, role), _name(rest), _name(keys), state)
                yield _name(keys + key + rest), leaf
        else:
            yield from _walk(child, keys + key, state, {**replaced, **role})


def _roles_of(node: Any, on_disk: bool) -> Mapping[str, Any]:
    """Returns the roles of the fields of a state, and none for another node."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields, roles = set(node._fields), _ROLES.get(type(node).__name__)
    elif isinstance(node, Mapping) and on_disk:  # in memory, dicts hold parameters or groups
        fields = set(node)
        roles = next((x for x in _ROLES.values() if x.keys() <= fields), None)
    else:
        return {}
    return roles or ({"count": UPDATES} if fields == {"count"} else {"mu": UNKNOWN})


def _name(keys: Any) -> str:
    """Returns a path without a last ``value``, which Flax Variables add and plain trees lack."""
    path = "/" + jax.tree_util.keystr(keys, simple=True, separator="/")
    return path.removesuffix("/value")[1:]


def _is_whole_number(x: Any) -> bool:
    return np.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _is_gone(x: Any) -> bool:
    deleted = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
    return deleted or isinstance(x, jax.ShapeDtypeStruct)
