"""``take_over``: the state of one optimizer as that of another."""

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from optax_muonplus._chain.checks import array_misfit
from optax_muonplus._chain.momentum import MomentumState
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._leaves import paths

MOMENTS = MOMENTUM, FIRST, SECOND = "momentum", "first moment", "second moment"
# Counts of updates, a schedule's first: moments may have started anew within a run.
UPDATES = SCHEDULE, STEPS, INJECTED = "schedule", "accumulated steps", "injected"
COUNTS = *UPDATES, AVERAGED, ADAM = *UPDATES, "momentum's count", "AdamW's count"
SETTING, _SETTINGS = "setting", ("hyperparams", "ns_coeffs", "b1")
_ROLES: dict[Any, dict[str, str]] = {
    MomentumState: {"mu": MOMENTUM, "count": AVERAGED},
    optax.contrib.MuonState: {"mu": MOMENTUM, "count": AVERAGED},
    optax.ScaleByAdamState: {"mu": FIRST, "nu": SECOND, "count": ADAM},
}


class TakenOver(NamedTuple):
    """What :func:`take_over` did with each array, such as ``"up/kernel: momentum"``.

    Arrays of the new state were ``kept`` from the old one, or ``started_anew``. Those of the old
    state without a place in the new one were ``not_used``. Arrays that are no moments are named
    with the class of their state: ``"1/ema/up/kernel: EmaState"``.
    """

    kept: tuple[str, ...]
    started_anew: tuple[str, ...]
    not_used: tuple[str, ...]

    def __str__(self) -> str:
        groups = self._asdict().items()
        lines = ((name, paths.list_paths((x, None) for x in found)) for name, found in groups)
        return "\n".join(f"{name.replace('_', ' ')}: {shown or 'nothing'}" for name, shown in lines)


def take_over(
    old_state: optax.OptState, new_state: optax.OptState, params: optax.Params
) -> tuple[optax.OptState, TakenOver]:
    r"""Converts the state of a running optimizer to that of another, in the middle of a run.

    Arrays are matched by the paths of their parameters and by their roles, in any wrapper. The
    momenta here and in ``optax.contrib.muon`` and AdamW's first moment are the same average,
    :math:`M_t = \beta M_{t-1} + (1 - \beta) G_t`. An array of another shape starts anew. AdamW's
    moments and count start anew together, unless the old state has both moments of all its
    parameters: a second moment that starts late makes long steps. A count continues the one of its
    kind at the most similar path, or another count of updates. The state of other wrappers is kept
    if the new state has it at the same path. Rates and other numbers are the new optimizer's.

    Call it outside of ``jax.jit``, after a complete step of accumulated gradients.

    Args:
      old_state: state of this library, ``optax.contrib.muon`` or ``optax.adamw``, in any wrapper.
      new_state: ``tx.init(params)`` of the new optimizer.
      params: the parameters of both; only their paths are read.

    Returns:
      The new state, with the structure, dtypes and shardings of ``new_state``, and a ``TakenOver``
      to print. Arrays that need no conversion are those of ``old_state``: do not use it again if
      the new state is donated.

    Raises:
      ValueError: if no momentum of these parameters is found, if several arrays or counts could be
        meant, or if gradients of an incomplete step have no place in the new state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = omp.muonplus(0.02, adam_learning_rate=1e-3)
      >>> state, report = omp.take_over(optax.adamw(1e-3).init(params), tx.init(params), params)
      >>> report.kept[-1]
      'up/kernel: momentum'
    """
    from optax_muonplus.int8 import store_like, widen

    old, new = _read("old_state", old_state, params), _read("new_state", new_state, params)
    by_name = {(x.role, x.name): x for x in old}
    pairs = [(x, _count(x, old) if x.role in COUNTS else _source(x, by_name)) for x in new]
    arrays = [(x, source) for x, source in pairs if x.role not in (SETTING, *COUNTS)]
    # All moments of AdamW share a count, so they continue together; a momentum alone may be new.
    anew = {x.group for x, _ in arrays} - {x.group for x, source in arrays if source}
    anew |= {x.group for x, source in arrays if not source and x.role != MOMENTUM}
    pairs = [(x, y if x.role in UPDATES or x.group not in anew else None) for x, y in pairs]
    used = {id(source) for _, source in pairs}
    unused = [x for x in old if id(x) not in used]
    _check_complete(unused)
    state = jax.tree.structure(widen(new_state)).unflatten(
        _place_like(source, x) if source else x.value for x, source in pairs
    )
    groups = [x for x, source in pairs if source], [x for x, source in pairs if not source], unused
    shown = ([x for x in group if x.role not in (SETTING, *COUNTS)] for group in groups)
    report = TakenOver(*(tuple(f"{x.name}: {x.role}" for x in group) for group in shown))
    return store_like(state, new_state), report


class _Leaf(NamedTuple):
    """An array of a state."""

    role: str  # the class of its state, if no other is known
    name: str  # path of its parameter, or its own path in the state
    group: str  # path of its named tuple
    value: Any


def _read(what: str, state: optax.OptState, params: optax.Params) -> list[_Leaf]:
    """Returns the arrays of a state in order; raises ValueError if it has no known momentum."""
    from optax_muonplus.int8 import widen

    names = {paths.path_name(path) for path in paths.flatten_with_names(params)[0]}
    leaves = [*_walk(widen(state), (), (), None)]
    moments = [x for x in leaves if x.role in MOMENTS and x.name in names]
    known = [(x.role, x.name) for x in moments if isinstance(x.value, jax.Array | np.ndarray)]
    if len({*known}) < len(known):
        role, name = next(x for x in known if known.count(x) > 1)
        raise ValueError(
            f"{what} has several arrays that are the {role} of {name}. Pass only the part of the"
            " state with the one you mean."
        )
    if not known:
        raise ValueError(
            f"Got a {type(state).__name__} as {what}, in which no momentum of these parameters is"
            " found. Known are the states of optax_muonplus, optax.contrib.muon and optax.adamw,"
            " in any wrapper. Pass tx.init(params) or a later state, with the same params."
        )
    return leaves


def _walk(node: Any, keys: Any, owner: Any, state: Any) -> Iterator[_Leaf]:
    """Yields the arrays below a node; ``owner`` is the path of ``state``, a named tuple above."""
    owner, state = (keys, node) if hasattr(node, "_fields") else (owner, state)
    for key, child in jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node):
        role = _role(state, (keys + key)[len(owner) :])
        if role in MOMENTS:  # parameters may be named tuples too
            for path, x in zip(*paths.flatten_with_names(child), strict=True):
                yield _Leaf(role, paths.path_name(path), _name(owner), x)
        elif key:
            yield from _walk(child, keys + key, owner, state)
        else:
            yield _Leaf(role, _name(keys), _name(owner), child)


def _role(state: Any, keys: Any) -> str:
    """Returns the role of what is at ``keys`` in a named tuple, or the name of its class."""
    fields, (field, *rest) = getattr(state, "_fields", ()), [_name((key,)) for key in keys] or [""]
    if field in _SETTINGS and not (rest and rest[0] in getattr(state, "hyperparams_states", {})):
        return SETTING
    if role := _ROLES.get(type(state), {}).get(field):
        return role
    if field == "gradient_step":
        return STEPS
    if field == "count" and not rest and (len(fields) == 1 or "hyperparams" in fields):
        return SCHEDULE if len(fields) == 1 else INJECTED
    return type(state).__name__


def _name(keys: Any) -> str:
    return paths.path_name(paths.path_of_keys(keys))


def _source(leaf: _Leaf, old: dict[tuple[str, str], _Leaf]) -> _Leaf | None:
    """Finds the old array of this role, name and shape, or a first moment for a momentum."""
    roles = {MOMENTUM: (MOMENTUM, FIRST), SETTING: ()}.get(leaf.role, (leaf.role,))
    same = (old[role, leaf.name] for role in roles if (role, leaf.name) in old)
    return next((x for x in same if not array_misfit(leaf.value, x.value)), None)


def _count(leaf: _Leaf, old: list[_Leaf]) -> _Leaf | None:
    """Finds the count of this kind at the most similar path, or else a count of updates."""
    kinds = ([x for x in old if x.role == role] for role in (leaf.role, *COUNTS))
    counts = next(filter(None, kinds), [])
    path = leaf.name.split("/")
    alike = [difflib.SequenceMatcher(None, x.name.split("/"), path).ratio() for x in counts]
    best = [x for x, ratio in zip(counts, alike, strict=True) if ratio == max(alike)]
    if len({int(x.value) for x in best}) > 1:
        shown = ", ".join(f"{x.name} is {x.value}" for x in best)
        raise ValueError(
            f"Counts of old_state differ, and each could be that of {leaf.name} in new_state:"
            f" {shown}. Pass only the part of the state with the one you mean."
        )
    return best[0] if best else None


def _check_complete(unused: list[_Leaf]) -> None:
    """Raises ValueError if gradients of an incomplete step would be dropped."""
    counts = ("MultiStepsState", "mini_step"), ("ApplyEvery", "count")
    for leaf in unused:
        if (leaf.role, leaf.name.split("/")[-1]) in counts and leaf.value:
            raise ValueError(
                f"{leaf.name} of old_state is {leaf.value}: gradients of an incomplete step"
                " have no place in new_state. Take over after a complete step."
            )


def _place_like(source: _Leaf, like: _Leaf) -> Any:
    """Returns the array of ``source`` with the dtype and the committed sharding of ``like``."""
    new, dtype = like.value, jnp.result_type(like.value)
    # A count gets memory of its own: JAX refuses to donate one array twice, or to mix a mesh with
    # an array that was read onto one device.
    x = jnp.array(np.array(source.value)) if like.role in COUNTS else jnp.asarray(source.value)
    x = x if x.dtype == dtype else saturating_cast(x, dtype)
    return jax.device_put(x, new.sharding) if getattr(new, "committed", False) else x
