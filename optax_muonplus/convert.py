"""Makes the state of one optimizer that of another: Optax's Muon, AdamW, and this library's."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from optax_muonplus._chain.momentum import MomentumState
from optax_muonplus._chain.paths import flatten_with_names, list_paths, path_name
from optax_muonplus._core.precision import saturating_cast

MOMENTUM, FIRST, SECOND, UPDATES = "momentum", "first moment", "second moment", "updates"
_Key = tuple[str, str]  # role and path of the parameter
_ROLES: dict[Any, dict[str, str]] = {
    MomentumState: {"mu": MOMENTUM},
    optax.contrib.MuonState: {"mu": MOMENTUM},
    optax.ScaleByAdamState: {"mu": FIRST, "nu": SECOND},
}


class TakenOver(NamedTuple):
    """What :func:`take_over` did with each array, such as ``"up/kernel: momentum"``.

    The new state has what was ``kept`` from the old one, and what ``started_anew`` as it was
    initialised. It has no place for what was ``not_used``.
    """

    kept: tuple[str, ...]
    started_anew: tuple[str, ...]
    not_used: tuple[str, ...]

    def __str__(self) -> str:
        groups = self._asdict().items()
        lines = ((name, list_paths((x, None) for x in found)) for name, found in groups)
        return "\n".join(f"{name.replace('_', ' ')}: {shown or 'nothing'}" for name, shown in lines)


def take_over(
    old_state: optax.OptState, new_state: optax.OptState, params: optax.Params
) -> tuple[optax.OptState, TakenOver]:
    r"""Makes the state of a running optimizer that of another, in the middle of a run.

    Arrays are matched by the paths of their parameters and by their roles, in any wrappers. Our
    momentum, that of ``optax.contrib.muon`` and AdamW's first moment are the same average,
    :math:`M_t = \beta M_{t-1} + (1 - \beta) G_t`. AdamW's group keeps its moments and its one count
    if the old state has both moments of all its parameters; else all of it starts anew, as a second
    moment that starts late would make long steps. Schedules go on at their count. Everything else
    is that of the new optimizer. Take over outside of ``jax.jit``, after a complete step of
    accumulated gradients.

    Args:
      old_state: state of ``optax_muonplus``, ``optax.contrib.muon`` or ``optax.adamw``, in any
        wrapper.
      new_state: ``tx.init(params)`` of the optimizer to go on with.
      params: the parameters of both; only their paths are read.

    Returns:
      The new state, with the structure, dtypes and shardings of ``new_state``, and a
      ``TakenOver`` to print. Arrays that need no conversion are those of ``old_state``: do not
      use it any more if the new one is donated.

    Raises:
      ValueError: for a state in which no momentum of these parameters is found, or two that could
        be meant.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = omp.muonplus(0.02, adam_learning_rate=1e-3)
      >>> state, report = omp.take_over(optax.adamw(1e-3).init(params), tx.init(params), params)
      >>> report.kept[-1]
      'up/kernel: momentum'
    """
    from optax_muonplus.int8 import store_like, widen

    names = {path_name(path) for path in flatten_with_names(params)[0]}
    buffers, counts = _read(widen(old_state), names)
    sources: dict[_Key, _Key] = {}  # what is kept in the new state, and where it was
    started_anew: list[_Key] = []

    def take(path: Any, node: Any) -> Any:
        if not _has_roles(node):
            return _count(counts, UPDATES, node) if _is_count(path, node) else node
        roles = _ROLES[type(node)]
        found = {key: _source(key, buffers) for field in roles for key, _ in _arrays(node, field)}
        missing = [key for key, source in found.items() if source is None]
        if missing and "nu" in roles:  # AdamW's moments go on together
            missing = [*found]
        started_anew.extend(missing)
        if missing and missing == [*found]:
            return node
        chosen = {key: source for key, source in found.items() if source is not None}
        sources.update(chosen)
        new = {
            field: jax.tree.structure(getattr(node, field)).unflatten(
                _place_like(buffers[chosen[key]], x) if key in chosen else x
                for key, x in _arrays(node, field)
            )
            for field in roles
        }
        if node.count is not None:
            new["count"] = _count(counts, roles["mu"], node.count)
        return node._replace(**new)

    state = jax.tree.map_with_path(take, widen(new_state), is_leaf=_has_roles)
    unused = buffers.keys() - sources.values()
    groups = [*sources], started_anew, [key for key in buffers if key in unused]
    report = TakenOver(*(tuple(f"{name}: {role}" for role, name in group) for group in groups))
    return store_like(state, new_state), report


def _has_roles(node: Any) -> bool:
    return type(node) in _ROLES


def _is_count(path: Any, leaf: Any) -> bool:
    """Tells whether a leaf counts updates, for a schedule or for bias correction."""
    names = ("count", "gradient_step")
    return jax.tree_util.keystr(path[-1:], simple=True) in names and not jnp.shape(leaf)


def _arrays(node: Any, field: str) -> Iterator[tuple[_Key, Any]]:
    for path, leaf in zip(*flatten_with_names(getattr(node, field)), strict=True):
        yield (_ROLES[type(node)][field], path_name(path)), leaf


def _read(state: optax.OptState, names: set[str]) -> tuple[dict[_Key, Any], dict[str, Any]]:
    """Returns the buffers of a state by role and parameter, and the first count of each role."""
    buffers: dict[_Key, Any] = {}
    counts: dict[str, Any] = {}
    for path, node in jax.tree.leaves_with_path(state, is_leaf=_has_roles):
        if not _has_roles(node):
            if _is_count(path, node):
                counts.setdefault(UPDATES, node)
            continue
        for key, leaf in (x for field in _ROLES[type(node)] for x in _arrays(node, field)):
            if key in buffers:
                raise ValueError(
                    f"The old state has several arrays that are the {' of '.join(key)}. Pass the"
                    " part of the state that holds the one you mean."
                )
            if key[1] in names:
                buffers[key] = leaf
        if node.count is not None:
            counts.setdefault(_ROLES[type(node)]["mu"], node.count)
    if not buffers:
        raise ValueError(
            f"Got a {type(state).__name__} as old_state, in which no momentum of these parameters"
            " is found. Known are the states of optax_muonplus, of optax.contrib.muon and of"
            " optax.adamw, in any wrapper. Pass the parameters as the optimizer's init got them."
        )
    return buffers, counts


def _source(key: _Key, buffers: dict[_Key, Any]) -> _Key | None:
    """Finds the array of that role, or AdamW's first moment for a momentum."""
    keys = [key, *([(FIRST, key[1])] if key[0] == MOMENTUM else [])]
    return next((key for key in keys if key in buffers), None)


def _count(counts: dict[str, Any], role: str, new: Any) -> Any:
    """Returns the old count of that role, or else one of updates, with memory of its own.

    JAX refuses to donate one array twice, and a count that was read onto one device would not go
    with arrays on a mesh.
    """
    order = (role, UPDATES, MOMENTUM, FIRST)
    old = next((counts[x] for x in order if x in counts), None)
    if old is None:
        return new
    count = jnp.array(np.array(old), new.dtype)
    return jax.device_put(count, new.sharding) if new.committed else count


def _place_like(old: Any, new: Any) -> Any:
    """Gives ``old`` the dtype of ``new``, and its sharding where ``new`` was put somewhere.

    Each device sends and receives what it lacks.
    """
    x = jnp.asarray(old)
    x = x if x.dtype == new.dtype else saturating_cast(x, new.dtype)
    return jax.device_put(x, new.sharding) if new.committed else x
