"""A recorder: measures of the matrices that an optimizer receives and returns, in its state."""

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp
from optax_muonplus.transforms import MatrixLayout

STAGES = ("before", "after")
MEASURES = ("norm", "rms", "row_ratio", "col_ratio")


class RecordState(NamedTuple):
    """State of :func:`recorded`.

    Attributes:
      inner: state of the transformation that is recorded.
      count: number of updates so far.
      step: the update of the latest record; -1 before the first one.
      values: float32 (stages, measures, matrices); NaN before the first record.
      names: JSON, as bytes, of the paths and batch shapes. Text cannot pass through ``jax.jit`` and
        checkpoints, and a key for each path cannot pass through ``optax.tree.map_params``.
    """

    inner: Any
    count: Any
    step: Any
    values: Any
    names: Any


class Record(NamedTuple):
    """The measures of one update, for every matrix.

    Attributes:
      step: the number of the update, counted from 1; -1 if there is no record yet.
      values: by path and then by ``stage/measure``: a float, or for a parameter of several matrices
        an array. Its axes are the batch axes, and one for the blocks of a fused parameter.
    """

    step: int
    values: dict[str, dict[str, float | np.ndarray]]


def recorded(
    inner: optax.GradientTransformation,
    *,
    every: int = 100,
    weight_dimension_numbers: Any = omp.muon_dimension_numbers,
    only: str = "",
) -> optax.GradientTransformationExtraArgs:
    r"""Records measures of what an optimizer, or a link of a chain, receives and returns.

    The stages are ``before``, usually the gradient, and ``after``, the update with learning rate
    and decay. At both, the measures of a matrix X of shape (m, n) = (out, in) are

    - ``norm``: :math:`\|X\|_F`, and ``rms``: :math:`\|X\|_F / \sqrt{mn}`;
    - ``row_ratio``: :math:`\max_i \|X_{i:}\| \,/ \min_i \|X_{i:}\|`, and ``col_ratio``, the same of
      columns. They are infinite if some norms are zero, and NaN if all are.

    Updates are not changed. An update with a record reads the matrices a few more times; other
    updates only add a branch. ``optax.chain(omp.momentum(), recorded(omp.orthogonalize()), ...)``
    records a momentum and its polar factor.

    Args:
      inner: the transformation to record.
      every: N, at least 1: updates N, 2 N, ... are recorded.
      weight_dimension_numbers: which leaves are matrices, and their axes: a tree of dimension
        numbers and None, or a function from a tree to such a tree of the same structure.
      only: a regular expression, searched in paths such as ``blocks/0/attn/query/kernel``.

    Raises:
      ValueError: for ``every`` below 1; at init, if there is no matrix to record.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.contrib.recorded(omp.muonplus(0.02), every=1)
      >>> params = {"dense": {"kernel": jnp.eye(4, 8)}}
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> omp.contrib.read_record(state).values["dense/kernel"]["before/norm"]
      2.0
    """
    if every < 1:
        raise ValueError(f"every={every} records no update: give 1 or more.")
    inner = optax.with_extra_args_support(inner)

    def matrices(tree: Any) -> dict[str, tuple[jax.Array, MatrixLayout]]:
        return dict(_matrices(tree, weight_dimension_numbers, re.compile(only)))

    def init_fn(params: optax.Params) -> RecordState:
        found = matrices(params)
        if jax.tree.leaves(params) and not found:
            raise ValueError(f"only={only!r} and the dimension numbers leave no matrix to record.")
        shapes = {path: _batch_shape(layout) for path, (_, layout) in found.items()}
        count = sum(map(math.prod, shapes.values()))
        return RecordState(
            inner.init(params),
            jnp.zeros([], jnp.int32),
            jnp.full([], -1, jnp.int32),
            jnp.full((len(STAGES), len(MEASURES), count), jnp.nan, jnp.float32),
            jnp.asarray(list(json.dumps(shapes).encode()), jnp.uint8),
        )

    def update_fn(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, RecordState]:
        results, inner_state = inner.update(updates, state.inner, params, **extra_args)
        count = optax.safe_increment(state.count)
        is_due, values = jnp.asarray(count) % every == 0, state.values

        def new() -> jax.Array:
            return jnp.stack([_measured(matrices(tree)) for tree in (updates, results)])

        if isinstance(is_due, jax.core.Tracer):
            values = jax.lax.cond(is_due, new, lambda: values)
        elif is_due:  # a branch outside of jit would be compiled each time
            values = new()
        step = jnp.where(is_due, count, state.step)
        return results, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def read_record(state: optax.OptState) -> Record:
    """Reads the latest record from an optimizer's state; waits for the update that made it.

    Raises:
      ValueError: unless there is exactly one :func:`recorded`, at any depth.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, RecordState))
    recorders = [x for x in nodes if isinstance(x, RecordState)]
    if len(recorders) != 1:
        raise ValueError(
            f"Got a state with {len(recorders)} recorders, but a record is read from one: pass the"
            " part of the state with one recorder."
        )
    step, values, names = jax.device_get(recorders[0][2:])
    by_path: dict[str, dict[str, float | np.ndarray]] = {}
    start = 0
    for path, batch in json.loads(bytes(names)).items():
        own = values[..., start : start + math.prod(batch)].reshape(*values.shape[:2], *batch)
        by_path[path] = {
            f"{stage}/{name}": x if batch else float(x)
            for stage, of_stage in zip(STAGES, own, strict=True)
            for name, x in zip(MEASURES, of_stage, strict=True)
        }
        start += math.prod(batch)
    return Record(int(step), by_path)


def _matrices(
    tree: Any, numbers: Callable[[Any], Any] | Any, only: re.Pattern[str]
) -> Iterator[tuple[str, tuple[jax.Array, MatrixLayout]]]:
    """Yields paths, arrays and layouts of the parameters that hold matrices."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    if not leaves:  # a placeholder of optax.tree.map_params
        return
    specs = treedef.flatten_up_to(numbers(tree) if callable(numbers) else numbers)
    for (path, x), spec in zip(leaves, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if spec is not None and only.search(name):
            yield name, (x, MatrixLayout.of(x.shape, spec))


def _batch_shape(layout: MatrixLayout) -> list[int]:
    batch = [layout.shape[axis] for axis in layout.batch_axes]
    return [*batch, len(layout.split_sizes)] if layout.split_sizes else batch


def _measured(found: dict[str, tuple[jax.Array, MatrixLayout]]) -> jax.Array:
    """Returns the measures of all matrices, (measures, matrices)."""
    arrays, layouts = zip(*found.values(), strict=True)

    def of_all(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate(list(map(_of_leaf, arrays, layouts)), axis=1)

    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if explicit:  # one array is made of shards of several leaves
        replicated = NamedSharding(explicit[0], PartitionSpec())
        return jax.sharding.auto_axes(of_all, out_sharding=replicated)(*arrays)
    return of_all(*arrays)


def _of_leaf(x: jax.Array, layout: MatrixLayout) -> jax.Array:
    """Returns the measures of one leaf, in the order of its batch axes and blocks."""
    parts = [x]
    if layout.split_axis is not None:
        parts = jnp.split(x, np.cumsum(layout.split_sizes[:-1]).tolist(), axis=layout.split_axis)
    each = jnp.stack([_of_matrices(part, layout) for part in parts], axis=-1)
    return each.reshape(len(MEASURES), -1)


def _of_matrices(x: jax.Array, layout: MatrixLayout) -> jax.Array:
    """Returns the measures of matrices, (measures, *batch)."""
    out, reduction, both = layout.output_axes, layout.reduction_axes, layout.matrix_axes
    size = jnp.abs(x).astype(jnp.promote_types(jnp.float32, x.real.dtype))
    # Entries are divided by the largest one: squares of small gradients would underflow.
    largest = jnp.max(size, axis=both, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    squares = jnp.square(size / largest)
    rows, columns = (jnp.sum(squares, axis=axes, keepdims=True) for axes in (reduction, out))
    norm = jnp.sqrt(jnp.sum(squares, axis=both)) * jnp.squeeze(largest, both)
    rms = norm / math.sqrt(math.prod(x.shape[axis] for axis in both))
    ratios = [jnp.sqrt(jnp.max(of, both) / jnp.min(of, both)) for of in (rows, columns)]
    return jnp.stack([norm, rms, *ratios]).astype(jnp.float32)
