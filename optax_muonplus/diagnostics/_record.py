"""The state of a recorder, and the record in it by parameter path."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus.diagnostics._measures import Measure, Values
from optax_muonplus.transforms import LeafInfo


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
    values: Values
    names: jax.Array


def empty_state(
    inner: Any, leaves: Sequence[LeafInfo], taken: Mapping[str, Sequence[Measure]]
) -> RecordState:
    """Returns the state before the first update, from ``inner`` and the measures of each stage."""
    shapes = {leaf.name: leaf.matrix.batch_shape for leaf in leaves}
    nothing = jnp.full([sum(map(math.prod, shapes.values()))], jnp.nan, jnp.float32)
    return RecordState(
        inner,
        jnp.zeros([], jnp.int32),
        jnp.full([], -1, jnp.int32),
        # One array in two places could not be donated.
        {stage: {x: jnp.copy(nothing) for x in own} for stage, own in taken.items()},
        jnp.asarray(list(json.dumps(shapes).encode()), jnp.uint8),
    )


class Record(NamedTuple):
    """The measures of one update, for every matrix.

    Attributes:
      step: the number of that update, counted from 1; -1 if nothing was recorded yet.
      values: by parameter path and then by ``stage/measure``, a float. For a parameter of several
        matrices it is an array: its axes are the batch axes of the parameter and then, if the
        parameter is fused, its parts.
    """

    step: int
    values: dict[str, dict[str, float | np.ndarray]]

    def as_json(self) -> dict[str, Any]:
        """Prepares for ``json.dumps``: arrays become lists, and NaN and infinity None."""
        values = {
            path: {name: _finite(np.asarray(value).tolist()) for name, value in measures.items()}
            for path, measures in self.values.items()
        }
        return {"step": self.step, "values": values}


def read(state: optax.OptState) -> Record:
    """Reads the latest record in an optimizer's state.

    It waits for the update that made the state. ``json.dumps(read(state).as_json())`` is one line
    of a log.

    Args:
      state: state of an optimizer.

    Raises:
      ValueError: unless there is exactly one :func:`recorded` or :func:`watched`, at any depth.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, RecordState))
    recorders = [x for x in nodes if isinstance(x, RecordState)]
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


def _finite(value: Any) -> Any:
    """Replaces what is not finite by None, in a number or nested lists of numbers."""
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return value if math.isfinite(value) else None
