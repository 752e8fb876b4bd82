"""What recorders have written into the state of an optimizer, by parameter path."""

import json
import math
from typing import Any, NamedTuple

import jax

from optax_muonplus.diagnostics._recording import RecordState


class Record(NamedTuple):
    """What a recorder has in its state.

    Attributes:
      step: the update, counted from 1, that it is of; -1 if there was none yet.
      values: by parameter path, then by ``stage/measure``: a float, or an array for a parameter of
        several matrices, whose axes are its batch axes and then, if it is fused, the blocks.
    """

    step: int
    values: dict[str, dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """The same for ``json.dumps``: lists for arrays, None for what is not finite."""
        values = {
            path: {name: _plain(value) for name, value in measures.items()}
            for path, measures in self.values.items()
        }
        return {"step": self.step, "values": values}


def read(state: Any) -> Record:
    """The latest record in an optimizer's state, wherever in it the recorder is.

    Waits for the update that made the state. One line of a log is
    ``json.dumps(read(state).as_json())``.

    Raises:
      ValueError: unless there is exactly one recorder in the state.
    """
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_record) if _is_record(x)]
    if len(found) != 1:
        raise ValueError(
            f"Got a state with {len(found)} recorders, but a record is read from one. Make the"
            " optimizer with optax_muonplus.diagnostics.recorded(omp.muonplus, every=...)(...), and"
            " where there are several pass the part of the state that holds the one you mean."
        )
    (own,) = found
    if own.names.ndim != 1:
        raise ValueError(
            f"Got the states of {own.names.shape[0]} optimizers under jax.vmap. Pass one of them:"
            " jax.tree.map(lambda x: x[0], state)."
        )
    step, values, names = jax.device_get((own.step, own.values, own.names))
    result: dict[str, dict[str, Any]] = {}
    start = 0
    for path, batch in json.loads(bytes(names)).items():
        stop = start + math.prod(batch)
        result[path] = {
            f"{stage}/{word}": x[start:stop].reshape(batch) if batch else float(x[start])
            for stage, measures in values.items()
            for word, x in measures.items()
        }
        start = stop
    return Record(int(step), result)


def _is_record(x: Any) -> bool:
    return isinstance(x, RecordState)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(x) for x in value] if isinstance(value, list) else _plain(value.tolist())
