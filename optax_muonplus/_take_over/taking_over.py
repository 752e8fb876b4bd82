"""The state of one optimizer as the beginning of another's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from optax_muonplus._parameters.folding import fold_all
from optax_muonplus._parameters.paths import Path, flatten_with_names, path_name
from optax_muonplus._take_over.matching import Match, matches
from optax_muonplus._take_over.placing import absence, misfit, placed
from optax_muonplus._take_over.reading import Reading, read, unknown_states
from optax_muonplus._take_over.report import TakenOver, entries

_SHOWN = 6  # names in a message
_KNOWN = (
    "Known are the states of optax_muonplus, of optax.contrib.muon, and of optax.adamw and its"
    " like, in any wrapper, or the same as a tree of arrays that a checkpoint holds."
)


def take_over(
    old_state: optax.OptState, new_state: optax.OptState, params: optax.Params
) -> tuple[optax.OptState, TakenOver]:
    r"""The state of a running optimizer as the state of another, in the middle of a run.

    What the two have in common is kept: leaves are matched by the paths of their parameters and the
    names of their fields, whatever wrappers are around them.

    - A matrix keeps its momentum: ours, that of ``optax.contrib.muon`` and AdamW's first moment are
      the same average, :math:`M_t = \beta M_{t-1} + (1 - \beta) G_t`. AdamW's has the memory of
      its own ``b1`` (10 gradients at 0.9), which grows to that of ``beta`` (20 at 0.95) within as
      many updates. The old second moment of a matrix has no use.
    - AdamW's group keeps both moments and their count if the old state has both for each of its
      parameters. Else the group starts anew, since all of it has one count: with it, a second
      moment from zero would make steps several times too long.
    - Schedules and other counters of updates go on.
    - States of other wrappers (``MultiSteps``, ``schedule_free``, ``lookahead``, ...) are kept
      where both have them in the same place.
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
      ValueError: for a state in which no momentum is found, or none of these parameters; for one
        that is known to be of another kind; for arrays of other shapes, or that are gone; if two
        arrays could be meant, or counts differ. The message lists them.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> old_state = optax.adamw(1e-3).init(params)
      >>> tx = omp.muonplus(0.02, adam_learning_rate=1e-3)
      >>> state, report = omp.take_over(old_state, tx.init(params), params)
      >>> report.kept[-1]
      'up/kernel: momentum'
    """
    paths, _ = flatten_with_names(params)
    old, new = read(old_state, set(paths)), read(new_state, set(paths))
    _check_known("old_state", old_state, old, paths)
    _check_known("new_state", new_state, new, paths)
    _check_arrays("old_state", {path: old.leaves[path] for path in (*old.buffers, *old.counts)})
    _check_arrays("new_state", new.leaves)
    found = matches(old, new)
    _check_places(old, new, found)
    used: set[Path] = set()
    result = []
    for path, leaf in new.leaves.items():
        source = found[path].source
        if source is None:
            result.append(leaf)
            continue
        result.append(placed(old.leaves[source], leaf, copy=source in used or not np.shape(leaf)))
        used.add(source)
    return new.unflatten(result), TakenOver(tuple(entries(old, new, found)))


def _check_known(what: str, state: Any, reading: Reading, parameters: Sequence[Path]) -> None:
    """Raises ValueError for a state of which nothing is known."""
    if unknown := unknown_states(state):
        raise ValueError(
            f"{what} has a momentum in {', '.join(unknown)}, which may not be the average of"
            f" gradients that it is here. {_KNOWN} Pass the part of the state that is one of them."
        )
    if reading.buffers:
        return
    wanted = _listed(path_name(path) for path in parameters)
    under_mu = [path for path in reading.leaves if "mu" in path]
    if not under_mu:
        raise ValueError(
            f"Got a {type(state).__name__} as {what}, in which no momentum is found:"
            f" {_listed(map(path_name, reading.leaves)) or 'it has no arrays'}. {_KNOWN}"
        )
    have = _listed(path_name(path[path.index("mu") + 1 :]) for path in under_mu)
    raise ValueError(
        f"The momentum in {what} is that of other parameters. It is of {have}; params are {wanted}."
        " Pass the parameters as the optimizer's init was given them."
    )


def _check_arrays(what: str, arrays: Mapping[Path, Any]) -> None:
    """Raises ValueError for shapes without arrays, and for arrays that are gone."""
    absent = [f"{path_name(p)} {why}" for p, x in arrays.items() if (why := absence(x))]
    if absent:
        raise ValueError(
            f"{what} must have arrays, but {_listed(absent)}. Take over before the old state is"
            " donated, and pass tx.init(params), not its shapes; under jax.jit that is free."
        )


def _check_places(old: Reading, new: Reading, found: dict[Path, Match]) -> None:
    """Raises ValueError unless each array can take the place that it is to have."""
    misfits = [
        f"{path_name(source)} {why}"
        for path, (source, _) in found.items()
        if source and (why := misfit(old.leaves[source], new.leaves[path]))
    ]
    if misfits:
        raise ValueError(
            f"Arrays of old_state do not fit: {_listed(misfits)}. It must be the state for these"
            " parameters."
        )


def _listed(names: Iterable[str]) -> str:
    shown = [name for name, _ in fold_all((name, None) for name in names)]
    return ", ".join(shown[:_SHOWN]) + (f", ... ({len(shown)})" if len(shown) > _SHOWN else "")
