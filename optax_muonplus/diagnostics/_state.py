"""Reads the record in the state of an optimizer, by parameter path."""

import json
import math
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
import optax

Arrays = dict[str, jax.Array]


class RecordState(NamedTuple):
    """State of a recorder.

    Attributes:
      inner: state of the transformation that is recorded.
      count: number of updates so far.
      step: the update that ``values`` are of; -1 before the first.
      values: by stage and measure, one number for each matrix; NaN before the first.
      names: JSON, as bytes, of the paths and the number of matrices in each. It is an array, since
        text would not pass through ``jax.jit`` and checkpoints, nor keys for each path through
        ``optax.tree.map_params``.
    """

    inner: Any
    count: Any
    step: Any
    values: dict[str, Arrays]
    names: jax.Array


class Record(NamedTuple):
    """The measures of one update, for every matrix.

    Attributes:
      step: the number of that update, counted from 1; -1 if nothing was recorded yet.
      values: by parameter path and then by ``stage/measure``, a float. For a parameter of several
        matrices it is an array, whose axes are the batch axes of the parameter and then, if the
        parameter is fused, its parts.
    """

    step: int
    values: dict[str, dict[str, float | np.ndarray]]

    def as_json(self) -> dict[str, Any]:
        """The record for ``json.dumps``: arrays become lists, and NaN and infinity None."""
        values = {
            path: {name: _jsonable(value) for name, value in measures.items()}
            for path, measures in self.values.items()
        }
        return {"step": self.step, "values": values}


def read(state: optax.OptState) -> Record:
    """The latest record in an optimizer's state.

    It waits for the update that made the state. ``json.dumps(read(state).as_json())`` is one line
    of a log.

    Args:
      state: state of an optimizer, in which :func:`recorded` or :func:`watched` may be at any
        depth.

    Raises:
      ValueError: unless there is exactly one recorder in the state.
    """
    recorders = [x for x in jax.tree.leaves(state, is_leaf=_is_recorder) if _is_recorder(x)]
    if len(recorders) != 1:
        raise ValueError(
            f"Got a state with {len(recorders)} recorders, but a record is read from one. Make the"
            " optimizer with optax_muonplus.diagnostics.recorded(omp.muonplus, every=...)(...), and"
            " where there are several pass the part of the state that holds the one you mean."
        )
    (recorder,) = recorders
    if recorder.names.ndim != 1:
        raise ValueError(
            f"Got the states of {recorder.names.shape[0]} optimizers under jax.vmap. Pass one of"
            " them: jax.tree.map(lambda x: x[0], state)."
        )
    step, values, names = jax.device_get((recorder.step, recorder.values, recorder.names))
    by_path: dict[str, dict[str, float | np.ndarray]] = {}
    start = 0
    for path, batch in json.loads(bytes(names)).items():
        stop = start + math.prod(batch)
        by_path[path] = {
            f"{stage}/{name}": x[start:stop].reshape(batch) if batch else float(x[start])
            for stage, measures in values.items()
            for name, x in measures.items()
        }
        start = stop
    return Record(int(step), by_path)


def _is_recorder(x: object) -> TypeGuard[RecordState]:
    return isinstance(x, RecordState)


def _jsonable(value: float | np.ndarray | list[Any]) -> float | list[Any] | None:
    """A number or nested lists of numbers, with None for what is not finite."""
    if isinstance(value, np.ndarray):
        return _jsonable(value.tolist())
    if isinstance(value, list):
        return [_jsonable(x) for x in value]
    return value if math.isfinite(value) else None
