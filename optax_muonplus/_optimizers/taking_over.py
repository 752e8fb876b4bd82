"""Takes over a state: what is carried, what is refused, where arrays are put, and a report."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from optax.tree_utils import NamedTupleKey

from optax_muonplus._optimizers.take_over_sources import (
    BUFFERS,
    COUNTS,
    Leaf,
    Leaves,
    known,
    leaves_of,
    listed,
    parameter_path,
    sources,
)
from optax_muonplus._parameters import Path, aligned, flatten_with_names, fold_all, path_name
from optax_muonplus.matrices import narrowed
from optax_muonplus.transforms import stored_like, widened

# States that have an average of gradients in `mu`; a tree from disk has no names of classes.
_WITH_AVERAGE = ("ScaleByAdamState", "MuonState", "MomentumState")
_KNOWN = (
    "Known are the states of optax_muonplus, of optax.contrib.muon, and of optax.adamw and its"
    " like, in any wrapper, or the same as a tree of arrays that a checkpoint holds."
)

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


def take_over(
    old_state: optax.OptState, new_state: optax.OptState, params: optax.Params
) -> tuple[optax.OptState, TakenOver]:
    r"""Makes the state of a running optimizer that of another, in the middle of a run.

    Leaves are matched by the paths of their parameters and the names of their fields, whatever
    wrappers are around them.

    - A matrix keeps its momentum: ours, that of ``optax.contrib.muon`` and AdamW's first moment are
      the same average, :math:`M_t = \beta M_{t-1} + (1 - \beta) G_t`.
    - AdamW's group keeps both moments and their count if the old state has both for each of its
      parameters; else all of it starts anew, since it has one count.
    - Schedules and other counts of updates go on. AdamW's count is taken for the number of updates
      only where nothing else counts them, since its group may have started anew.
    - Wrappers (``schedule_free``, ``lookahead``, ...) keep their state where both have it in the
      same place.
    - Learning rates and all other settings are those of ``new_state``.

    Args:
      old_state: state of ``optax_muonplus``, ``optax.contrib.muon`` or ``optax.adamw``, in any
        wrapper, or of an older version; or the same as dicts and lists, as a checkpoint is read
        without the optimizer that wrote it. AMSGrad and others whose fields have AdamW's names
        cannot be told from it there.
      new_state: ``tx.init(params)`` of the optimizer to go on with, ours or one of the others.
      params: the parameters of both; only their paths are read.

    Returns:
      The new state, with the structure, dtypes and shardings of ``new_state``, and a
      :class:`TakenOver` to print. Arrays that need no conversion are those of ``old_state``
      themselves: do not use it any more if the new one is donated. Under ``jax.jit`` with
      ``donate_argnums=0`` no memory for a second state is used, also for a ``tx.init`` inside.

    Raises:
      ValueError: for a state in which no momentum of these parameters is found, or one of another
        kind; for arrays of other shapes, or that are gone; if two arrays could be meant, or counts
        that could be meant differ; for ``MultiSteps`` in the middle of a step. The message lists
        them.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> old_state = optax.adamw(1e-3).init(params)
      >>> tx = omp.muonplus(0.02, adam_learning_rate=1e-3)
      >>> state, report = omp.take_over(old_state, tx.init(params), params)
      >>> report.kept[-1]
      'up/kernel: momentum'
    """
    paths = {parameter_path(path) for path in flatten_with_names(params)[0]}
    old_state = widened(old_state)
    old, _ = leaves_of(old_state, paths)
    new, replace = leaves_of(widened(new_state), paths)
    _check_known("old_state", old_state, old, paths)
    _check_known("new_state", new_state, new, paths)
    found = sources(old, new)
    used: set[Path] = set()
    values, entries = {}, []
    for path, (source, why) in found.items():
        to = new[path]
        if source is None:
            entries.append(Entry(to.name, to.what, "started anew", why))
            continue
        values[path] = _placed(source, old[source].value, to.value, copy=source in used)
        used.add(source)
        entries.append(Entry(to.name, to.what, "kept", _note(old[source], to)))
    _check_complete_step(old, used)
    for path, leaf in old.items():
        if path not in used and leaf.what in BUFFERS:
            entries.append(Entry(leaf.name, leaf.what, "not used", "no place in the new state"))
    return stored_like(replace(values), new_state), TakenOver(tuple(entries))


def _note(old: Leaf, new: Leaf) -> str:
    """Says where a count is, or where an array was, and what was changed in it."""
    if old.what in COUNTS:
        number = known(old.value)
        return "" if number is None else f"at {number:,}"
    notes = [path_name(old.owner)]
    if old.what != new.what:
        notes.append(f"AdamW's {old.what}")
    if (dtype := jnp.result_type(old.value)) != new.value.dtype:
        notes.append(f"{dtype} to {new.value.dtype}")
    return ", ".join(notes)


def _placed(source: Path, old: Any, new: Any, copy: bool) -> Any:
    """Gives ``old`` the dtype of ``new``, and its sharding where ``new`` was put somewhere.

    Nothing is gathered: each device sends and receives what it lacks. A ``copy`` has memory of its
    own, since JAX refuses to donate one array twice.
    """
    if np.shape(old) != np.shape(new) or jnp.iscomplexobj(old) > jnp.iscomplexobj(new):
        was, wanted = (f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (old, new))
        raise ValueError(
            f"{path_name(source)} of old_state does not fit: it is {was}, and {wanted} in the new"
            " state. Pass the state for these parameters."
        )
    x = old
    if jnp.result_type(old) != new.dtype:
        inexact = jnp.issubdtype(new.dtype, jnp.inexact)
        x = narrowed(jnp.asarray(old), new.dtype) if inexact else jnp.asarray(old, new.dtype)
    if isinstance(x, jax.core.Tracer) or isinstance(new, jax.core.Tracer):
        here, wanted = jax.typeof(x).sharding, jax.typeof(new).sharding
        return x if here == wanted else jax.sharding.reshard(x, wanted)
    if new.committed:
        x = jax.device_put(x, new.sharding)
    elif not new.shape:  # a count that was read onto one device would not go with arrays on a mesh
        x = np.array(x)
    return jnp.array(x) if copy else jnp.asarray(x)


def _check_known(
    what: str, state: optax.OptState, leaves: Leaves, parameters: Collection[Path]
) -> None:
    """Raises ValueError for a state without a momentum that is known, or without arrays."""
    owners = (path[-1] for path, _ in optax.tree.get_all_with_path(state, "mu"))
    names = {key.tuple_name for key in owners if isinstance(key, NamedTupleKey)}
    if unknown := sorted(names.difference(_WITH_AVERAGE)):
        raise ValueError(
            f"{what} has a momentum in {', '.join(unknown)}, which may not be the average of"
            f" gradients that it is here. {_KNOWN} Pass the part of the state that is one of them."
        )
    if not any(leaf.what in BUFFERS for leaf in leaves.values()):
        raise ValueError(
            f"Got a {type(state).__name__} as {what}, in which no momentum of these parameters is"
            f" found. It has {listed(map(path_name, leaves)) or 'no arrays'}; params are"
            f" {listed(map(path_name, sorted(parameters)))}. {_KNOWN} Pass the parameters as the"
            " optimizer's init was given them."
        )
    if gone := [path_name(path) for path, leaf in leaves.items() if _is_gone(leaf.value)]:
        raise ValueError(
            f"{what} must have arrays, but these are shapes or were donated: {listed(gone)}. Take"
            " over before the old state is donated, and pass tx.init(params), not its shapes;"
            " under jax.jit that is free."
        )


def _is_gone(x: Any) -> bool:
    deleted = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
    return deleted or isinstance(x, jax.ShapeDtypeStruct)


def _check_complete_step(old: Leaves, used: Collection[Path]) -> None:
    """Raises ValueError for gradients of ``MultiSteps`` that would be lost or come too late."""
    for path, leaf in old.items():
        number = known(leaf.value) if path[-1:] == ("mini_step",) else 0
        if number or (number is None and path not in used):
            raise ValueError(
                f"{path_name(path)} of old_state must be 0, but is {number or 'not known here'}:"
                " MultiSteps holds gradients of a step that is not complete. Take over after a"
                " complete step, and outside of jax.jit."
            )
