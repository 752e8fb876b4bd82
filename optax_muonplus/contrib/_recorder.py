"""A recorder: a few numbers of each matrix that an optimizer is given and returns, in its state."""

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

STAGES = ("before", "after")
MEASURES = ("norm", "rms", "row_ratio", "col_ratio")


class RecordState(NamedTuple):
    """State of :func:`recorded`.

    Attributes:
      inner: state of the transformation that is recorded.
      count: number of updates so far.
      step: the update that ``values`` are of; -1 before the first.
      values: float32 (stages, measures, matrices); NaN before the first.
      names: JSON, as bytes, of the paths and the batch axes of each. It is an array, since text
        would not pass through ``jax.jit`` and checkpoints, nor keys for each path through
        ``optax.tree.map_params``.
    """

    inner: Any
    count: Any
    step: Any
    values: Any
    names: Any


class Record(NamedTuple):
    """The measures of one update, for every matrix.

    Attributes:
      step: the number of that update, counted from 1; -1 if nothing was recorded yet.
      values: by path and then by ``stage/measure``, a float. For a parameter of several matrices it
        is an array, whose axes are the batch axes and then, if the parameter is fused, its parts.
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
    r"""Makes an optimizer, or a link of a chain, record what it is given and what it returns.

    At the stages ``before`` (as a rule the gradient) and ``after`` (the update, with learning rate
    and decay) every matrix X of shape (m, n) = (out, in) has the measures

    - ``norm``: :math:`\|X\|_F`, and ``rms``: :math:`\|X\|_F / \sqrt{mn}`;
    - ``row_ratio``: :math:`\max_i \|X_{i:}\| \,/ \min_i \|X_{i:}\|`, and ``col_ratio``, the same of
      columns. They are infinite if some norms are zero, and NaN if all are.

    Updates are those of ``inner``. An update with a record reads the matrices a few times; the
    others pay for a branch. ``optax.chain(omp.momentum(), recorded(omp.orthogonalize()), ...)``
    records a momentum and its polar factor.

    Args:
      inner: what is recorded.
      every: N for the updates N, 2 N, ..., at least 1.
      weight_dimension_numbers: which leaves are matrices, and their axes: a function from a tree to
        one of its structure with dimension numbers and None, or such a tree.
      only: a regular expression, searched in paths such as ``blocks/0/attn/query/kernel``.

    Raises:
      ValueError: for ``every`` below 1; at init, if no matrix is left to be recorded.

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

    def matrices(tree: Any) -> dict[str, tuple[jax.Array, Any]]:
        return dict(_matrices(tree, weight_dimension_numbers, re.compile(only)))

    def init_fn(params: optax.Params) -> RecordState:
        found = matrices(params)
        if jax.tree.leaves(params) and not found:
            raise ValueError(f"only={only!r} and the dimension numbers leave no matrix to record.")
        shapes = {path: _batch_shape(x.shape, spec) for path, (x, spec) in found.items()}
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
    """Reads the latest record in an optimizer's state; it waits for the update that made it.

    Raises:
      ValueError: unless there is exactly one :func:`recorded`, at any depth.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, RecordState))
    recorders = [x for x in nodes if isinstance(x, RecordState)]
    if len(recorders) != 1:
        raise ValueError(
            f"Got a state with {len(recorders)} recorders, but a record is read from one: pass the"
            " part of the state that holds it."
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
) -> Iterator[tuple[str, tuple[jax.Array, Any]]]:
    """Paths, arrays and dimension numbers of the matrices of a tree."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    if not leaves:  # optax.tree.map_params asks about such a tree
        return
    specs = treedef.flatten_up_to(numbers(tree) if callable(numbers) else numbers)
    for (path, x), spec in zip(leaves, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if spec is not None and only.search(name):
            yield name, (x, spec)


def _axes(shape: tuple[int, ...], given: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis % len(shape) for axis in np.atleast_1d(given).tolist())


def _sides(shape: tuple[int, ...], spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of rows and of columns."""
    return _axes(shape, spec.output_axis), _axes(shape, spec.reduction_axis)


def _batch_shape(shape: tuple[int, ...], spec: Any) -> list[int]:
    out, reduction = _sides(shape, spec)
    batch = [size for axis, size in enumerate(shape) if axis not in out + reduction]
    return [*batch, len(sizes)] if (sizes := _split_sizes(spec)) else batch


def _split_sizes(spec: Any) -> tuple[int, ...]:
    return getattr(spec, "split_sizes", None) or ()


def _measured(found: dict[str, tuple[jax.Array, Any]]) -> jax.Array:
    """The measures of all matrices, (measures, matrices)."""
    arrays, specs = [x for x, _ in found.values()], [spec for _, spec in found.values()]

    def of_all(*arrays: jax.Array) -> jax.Array:
        each = [_of_leaf(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        return jnp.concatenate(each, axis=1)

    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if explicit:  # shards of several leaves are put into one array
        replicated = NamedSharding(explicit[0], PartitionSpec())
        return jax.sharding.auto_axes(of_all, out_sharding=replicated)(*arrays)
    return of_all(*arrays)


def _of_leaf(x: jax.Array, spec: Any) -> jax.Array:
    """The measures of the matrices of one leaf, in the order of its batch axes and parts."""
    out, reduction = _sides(x.shape, spec)
    parts = [x]
    if sizes := _split_sizes(spec):
        given = spec.split_axis
        axis = out[0] if given is None else given
        parts = jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=axis)
    each = jnp.stack([_of_matrices(part, out, reduction) for part in parts], axis=-1)
    return each.reshape(len(MEASURES), -1)


def _of_matrices(x: jax.Array, out: tuple[int, ...], reduction: tuple[int, ...]) -> jax.Array:
    """The measures of matrices, (measures, *batch).

    Entries are divided by the largest one first: squares of small gradients would underflow.
    """
    both = out + reduction
    size = jnp.abs(x).astype(jnp.promote_types(jnp.float32, x.real.dtype))
    largest = jnp.max(size, axis=both, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    squares = jnp.square(size / largest)
    rows, columns = (jnp.sum(squares, axis=axes, keepdims=True) for axes in (reduction, out))
    norm = jnp.sqrt(jnp.sum(squares, axis=both)) * jnp.squeeze(largest, both)
    rms = norm / math.sqrt(math.prod(x.shape[axis] for axis in both))
    ratios = [jnp.sqrt(jnp.max(of, both) / jnp.min(of, both)) for of in (rows, columns)]
    return jnp.stack([norm, rms, *ratios]).astype(jnp.float32)
