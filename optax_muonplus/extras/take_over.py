"""Makes the state of one optimizer that of another: arrays are matched by parameter and role."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.messages import flatten_with_names, fold_all, listed, path_name
from optax_muonplus.method import narrowed
from optax_muonplus.transforms import stored_like, widened

# Roles of arrays, in the words of the report.
MOMENTUM, FIRST, SECOND = "momentum", "first moment", "second moment"
SQUARES, UNKNOWN = "running mean of squares", "momentum of an unknown kind"
BUFFERS = (MOMENTUM, FIRST, SECOND, SQUARES, UNKNOWN)
UPDATES, INJECTED, AVERAGED = "count", "injected count", "momentum's count"
ADAMW = "AdamW's count"  # it corrects moments for their zero start
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


class Entry(NamedTuple):
    """What became of one array."""

    name: str  # path of the parameter that it belongs to, or of the part of the state
    state: str  # its role
    outcome: Literal["kept", "started anew", "not used"]  # the last: it has no place in the new one
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
        roles: dict[tuple[str, str, str], list[str]] = {}
        for name, role, outcome, note in self.entries:
            roles.setdefault((name, outcome, note), []).append(role)
        lines = [
            (name, (" and ".join(have).replace("moment and", "and"), outcome, note))
            for (name, outcome, note), have in roles.items()
        ]
        rows = [(name, *rest) for name, rest in fold_all(lines)]
        table = aligned([("name", "state", "outcome", "from, or why"), *rows])
        settings = "Learning rates and other settings are those of the new optimizer."
        return "\n".join([*table, settings])

    def _with(self, outcome: str) -> tuple[str, ...]:
        return tuple(f"{x.name}: {x.state}" for x in self.entries if x.outcome == outcome)


def take_over(
    old_state: optax.OptState, new_state: optax.OptState, params: optax.Params
) -> tuple[optax.OptState, TakenOver]:
    r"""Makes the state of a running optimizer that of another, in the middle of a run.

    Arrays are matched by the paths of their parameters and by their roles, in any wrappers. Our
    momentum, that of ``optax.contrib.muon`` and AdamW's first moment are the same average,
    :math:`M_t = \beta M_{t-1} + (1 - \beta) G_t`. AdamW's group keeps its moments and its one count
    if the old state has both moments of all its parameters; else all of it starts anew. Schedules
    go on at their count. Settings are those of the new optimizer. The page on checkpoints
    says what becomes of each state.

    Args:
      old_state: state of ``optax_muonplus``, ``optax.contrib.muon`` or ``optax.adamw``, in any
        wrapper, or of an older version; or the same as dicts and lists, as a checkpoint is read
        without its optimizer. There AMSGrad and others with AdamW's fields are taken for AdamW.
      new_state: ``tx.init(params)`` of the optimizer to go on with, ours or one of the others.
      params: the parameters of both; only their paths are read.

    Returns:
      The new state, with the structure, dtypes and shardings of ``new_state``, and a
      :class:`TakenOver` to print. Arrays that need no conversion are those of ``old_state``: do not
      use it any more if the new one is donated. ``jax.jit`` with ``donate_argnums=0`` needs no
      memory for a second state, also for a ``tx.init`` inside.

    Raises:
      ValueError: for a state in which no momentum of these parameters is found, or one of another
        kind; for arrays of other shapes, or that are gone; if two arrays could be meant, or counts
        that could be meant differ; for ``MultiSteps`` in the middle of a step.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = omp.muonplus(0.02, adam_learning_rate=1e-3)
      >>> state, report = omp.take_over(optax.adamw(1e-3).init(params), tx.init(params), params)
      >>> report.kept[-1]
      'up/kernel: momentum'
    """
    wide = widened(new_state)
    old, new = _read("old_state", widened(old_state), params), _read("new_state", wide, params)
    arrays, entries, used = {path: leaf.value for path, leaf in new.items()}, [], set[str]()
    for path, source in _sources(old, new).items():
        leaf = new[path]
        if source not in old:
            entries.append(Entry(leaf.name, leaf.role, "started anew", source))
            continue
        arrays[path] = _placed(source, old[source].value, leaf.value, copy=source in used)
        entries.append(Entry(leaf.name, leaf.role, "kept", _note(old[source], leaf)))
        used.add(source)
    for path, leaf in old.items():
        number = _known(leaf.value) if leaf.role == MINI_STEP else 0
        if number or (number is None and path not in used):
            raise ValueError(
                f"{path} of old_state must be 0, but is {number or 'not known here'}: MultiSteps"
                " holds gradients of a step that is not complete. Take over after a complete step,"
                " and outside of jax.jit."
            )
        if path not in used and leaf.role in BUFFERS:
            entries.append(Entry(leaf.name, leaf.role, "not used", "no place in the new state"))
    state = jax.tree.unflatten(jax.tree.structure(wide), arrays.values())
    return stored_like(state, new_state), TakenOver(tuple(entries))


def _read(what: str, state: optax.OptState, params: optax.Params) -> dict[str, Leaf]:
    """Returns a state's arrays by path, in order, or raises ValueError if it is no known state."""
    pairs = zip(jax.tree.leaves_with_path(params), flatten_with_names(params)[0], strict=True)
    names = {_name(keys): path_name(path) for (keys, _), path in pairs}
    leaves = {}
    for path, leaf in _walk(state, (), "", {}):
        name = names.get(leaf.name) if leaf.role in BUFFERS else path
        if leaf.role in COUNTS:
            integer = jnp.issubdtype(jnp.result_type(leaf.value), jnp.integer)
            name = (leaf.owner or "(root)") if integer and not np.shape(leaf.value) else None
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
    if gone := [(path, None) for path, leaf in leaves.items() if not _is_there(leaf.value)]:
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


def _is_there(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return True
    return not (x.is_deleted() if isinstance(x, jax.Array) else isinstance(x, jax.ShapeDtypeStruct))


def _sources(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> dict[str, str]:
    """Finds for each array of ``new``, settings excepted, its path in ``old``, or why it has none.

    AdamW's group has one count. With it, a second moment that starts at zero would make steps
    several times too long; and a first moment without a second one would be divided by epsilon
    where a gradient is zero, as for a token outside of the batch. So the group is kept as a whole.
    """
    have: dict[tuple[str, str], list[str]] = {}
    for path, leaf in old.items():
        have.setdefault((leaf.role, leaf.name), []).append(path)
    found = {path: _source(leaf, old, have) for path, leaf in new.items() if leaf.role != SETTING}
    for path, leaf in new.items():
        if leaf.role in COUNTS:
            group = [p for p, x in new.items() if x.owner == leaf.owner and x.role in BUFFERS]
            missing = sorted({new[p].name for p in group if found[p] not in old})
            owners = {old[found[p]].owner for p in group if found[p] in old}
            if leaf.role == ADAMW and missing:
                folded = [name for name, _ in fold_all((name, None) for name in missing)]
                names = ", ".join(folded[:2]) + ", ..." * (len(folded) > 2)
                why = f"no {SECOND} of {names}; the group has one count"
                found.update(dict.fromkeys((path, *group), why))
            elif owners or not group:
                found[path] = _count(path, leaf.role, old, owners)
    return found


def _source(leaf: Leaf, old: Mapping[str, Leaf], have: Mapping[tuple[str, str], list[str]]) -> str:
    """Finds the array of the same role and name, or AdamW's first moment for a momentum."""
    paths = [] if leaf.role in COUNTS else have.get((leaf.role, leaf.name), [])
    if leaf.role == MOMENTUM:
        paths = paths or have.get((FIRST, leaf.name), [])
    elif leaf.role in (SQUARES, OTHER, MINI_STEP):  # in other classes they mean something else
        same = (np.shape(leaf.value), leaf.state)
        paths = [x for x in paths if (np.shape(old[x].value), old[x].state or leaf.state) == same]
    if len(paths) > 1:
        raise ValueError(
            f"The old state has several arrays that are the {leaf.role} of {leaf.name}:"
            f" {', '.join(paths)}. Pass the part of the state that holds the one you mean."
        )
    return paths[0] if paths else "not in the old state"


def _count(path: str, role: str, old: Mapping[str, Leaf], owners: Collection[str]) -> str:
    """Finds the count of the same moments, of the same role, or else of updates."""
    counts = {p: x for p, x in old.items() if x.role in COUNTS}
    ranked = [[p for p, x in counts.items() if x.role == role and x.owner in owners]]
    ranked += [[p for p, x in counts.items() if x.role == each] for each in (role, *COUNTS)]
    candidates = next(filter(None, ranked), [])
    numbers = {p: number for p in candidates if (number := _known(old[p].value)) is not None}
    if len(set(numbers.values())) > 1:
        shown = ", ".join(f"{name} is {number}" for name, number in numbers.items())
        raise ValueError(
            f"Counts of the old state differ, and each could be that of {path} in the new state:"
            f" {shown}. Pass the part of the state that holds the one you mean, or set them to the"
            " same number."
        )
    return candidates[0] if candidates else "the old state counts no updates"


def _placed(source: str, old: Any, new: Any, copy: bool) -> Any:
    """Gives ``old`` the dtype of ``new``, and its sharding where ``new`` was put somewhere.

    Nothing is gathered: each device sends and receives what it lacks. A ``copy`` has memory of its
    own, because JAX refuses to donate one array twice.
    """
    if np.shape(old) != np.shape(new) or jnp.iscomplexobj(old) > jnp.iscomplexobj(new):
        was, wanted = (f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (old, new))
        raise ValueError(
            f"{source} of old_state does not fit: it is {was}, and {wanted} in the new state. Pass"
            " the state for these parameters."
        )
    x = old
    if jnp.result_type(old) != new.dtype:
        cast = narrowed if jnp.issubdtype(new.dtype, jnp.inexact) else jnp.asarray
        x = cast(jnp.asarray(old), new.dtype)
    if isinstance(x, jax.core.Tracer) or isinstance(new, jax.core.Tracer):
        here, wanted = jax.typeof(x).sharding, jax.typeof(new).sharding
        return x if here == wanted else jax.sharding.reshard(x, wanted)
    if new.committed:
        x = jax.device_put(x, new.sharding)
    elif not new.shape:  # a count that was read onto one device would not go with arrays on a mesh
        x = np.array(x)
    return jnp.array(x) if copy else jnp.asarray(x)


def _note(old: Leaf, new: Leaf) -> str:
    """Says where a count is, or where an array was, and what was changed in it."""
    if old.role in COUNTS:
        return "" if (number := _known(old.value)) is None else f"at {number:,}"
    dtype = jnp.result_type(old.value)
    notes = [old.owner or "(root)", f"AdamW's {old.role}" * (old.role != new.role)]
    notes += [f"{dtype} to {new.value.dtype}" * (dtype != new.value.dtype)]
    return ", ".join(filter(None, notes))


def _known(number: Any) -> int | None:
    """Returns the number in an array, None while it is traced."""
    return None if isinstance(number, jax.core.Tracer) else int(number)


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Makes the lines of a table; the first of ``rows`` is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]
