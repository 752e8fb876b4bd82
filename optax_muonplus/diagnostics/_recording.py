"""A transformation that also keeps measures of the matrices it works on in its state.

A :class:`Probe` says what is measured. This module decides when, for which matrices, and where the
values are kept.
"""

import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muonplus._execution import pick
from optax_muonplus._parameters import LeafInfo
from optax_muonplus.diagnostics._measures import Measure, measure, measures_by_stage
from optax_muonplus.diagnostics._state import Arrays, RecordState
from optax_muonplus.matrices import Norm

# Number of the update, from 1, to whether it is recorded.
Schedule = Callable[[Any], Any]


class Probe(NamedTuple):
    """What a recorder looks at: a few stages of the way from gradient to update.

    Attributes:
      stages: their names, in order; see ``measures``.
      capture: from leaves, updates, the inner state before the update and the updates after it to
        arrays by path. It runs at every update, and should cost nothing.
      unfold: from leaves and what was captured to the arrays of each stage by path. It runs at
        recorded updates only.
      norm: the normalization that follows the second stage.
      norm_eps: its floor.
    """

    stages: tuple[str, ...]
    capture: Callable[[Sequence[LeafInfo], Any, Any, Any], Any]
    unfold: Callable[[Sequence[LeafInfo], Any], dict[str, Arrays]]
    norm: Norm = "none"
    norm_eps: Any = 0.0


def record(
    inner: optax.GradientTransformation,
    probe: Probe,
    find: Callable[[Any], Sequence[LeafInfo]],
    due: Schedule,
    measures: Sequence[Measure],
) -> optax.GradientTransformationExtraArgs:
    """``inner``, with ``measures`` of what ``probe`` sees kept in a :class:`RecordState`.

    Args:
      inner: the transformation. Its updates are returned as they are.
      probe: what is measured.
      find: from a tree of parameters or updates to the matrices that are measured.
      due: see :data:`Schedule`.
      measures: names of :data:`Measure`.
    """
    inner = optax.with_extra_args_support(inner)
    kept = measures_by_stage(probe.stages, measures)

    def init_fn(params: optax.Params) -> Any:
        leaves = find(params)
        total = sum(math.prod(leaf.matrix.batch_shape) for leaf in leaves)
        nothing = jnp.full([total], jnp.nan, jnp.float32)
        shapes = json.dumps({leaf.name: leaf.matrix.batch_shape for leaf in leaves}).encode()
        return RecordState(
            inner.init(params),
            jnp.zeros([], jnp.int32),
            jnp.full([], -1, jnp.int32),
            {stage: dict.fromkeys(names, nothing) for stage, names in kept.items()},
            jnp.asarray(list(shapes), jnp.uint8),
        )

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        _check_state(state)
        results, inner_state = inner.update(updates, state.inner, params, **extra_args)
        count = optax.safe_increment(state.count)
        leaves = find(updates)
        captured = probe.capture(leaves, updates, state.inner, results)
        is_due = jnp.asarray(due(count), bool)

        def measured(captured: Any) -> dict[str, Arrays]:
            stages = probe.unfold(leaves, captured)
            measure_all = functools.partial(_measured, probe, leaves, measures)
            return _with_auto_axes(measure_all, stages, jnp.asarray(probe.norm_eps))

        values = _if_due(is_due, measured, state.values, captured) if leaves else state.values
        step = jnp.where(is_due, count, state.step)
        return results, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_state(state: Any) -> None:
    if not isinstance(state, RecordState):
        raise ValueError(
            f"Got a {type(state).__name__}, the state of an optimizer that does not record. To"
            " record from here on pass tx.init(params)._replace(inner=state); to stop, go on"
            " with state.inner."
        )


def _if_due(is_due: jax.Array, measured: Callable[[Any], Any], values: Any, captured: Any) -> Any:
    """``measured(captured)`` if ``is_due``, or else ``values``, without computing the former."""
    if not isinstance(is_due, jax.core.Tracer):  # a branch outside of jit is compiled each time
        return measured(captured) if is_due else values
    return jax.lax.cond(is_due, lambda old, x: measured(x), lambda old, x: old, values, captured)


def _with_auto_axes(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, with Explicit mesh axes made Auto: types would forbid most reshapes."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not explicit:
        return function(*args)
    replicated = NamedSharding(explicit[0], PartitionSpec())
    return jax.sharding.auto_axes(function, out_sharding=replicated)(*args)


def _measured(
    probe: Probe,
    leaves: Sequence[LeafInfo],
    measures: Sequence[Measure],
    stages: dict[str, Arrays],
    norm_eps: jax.Array,
) -> dict[str, Arrays]:
    """By stage and measure, one number for each matrix of all leaves."""
    blocks_of_leaves = [_blocks(leaf, stages) for leaf in leaves]
    blocks = [block for leaf_blocks in blocks_of_leaves for block in leaf_blocks]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (transposed, block) in enumerate(blocks):
        key = (transposed, *((x.shape, x.dtype) for x in block.values()))
        groups.setdefault(key, []).append(i)

    def measure_block(transposed: bool, block: Arrays) -> dict[str, Arrays]:
        upright = {k: jnp.swapaxes(x, -1, -2) if transposed else x for k, x in block.items()}
        return measure(upright, probe.stages, measures, probe.norm, norm_eps)

    values: dict[int, Any] = {}
    for (transposed, *_), members in groups.items():
        function = functools.partial(measure_block, transposed)
        values |= zip(members, _map(function, [blocks[i][1] for i in members]), strict=True)
    in_order = iter(values[i] for i in range(len(blocks)))
    by_leaf = [[next(in_order) for _ in leaf_blocks] for leaf_blocks in blocks_of_leaves]
    joined = [
        jax.tree.map(functools.partial(_joined, leaf), *each)
        for leaf, each in zip(leaves, by_leaf, strict=True)
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *joined)


def _joined(leaf: LeafInfo, *runs: jax.Array) -> jax.Array:
    """One number for each matrix of a leaf, blocks last, from those of each run of its blocks."""
    count = math.prod(leaf.shape[axis] for axis in leaf.matrix.batch_axes)
    return jnp.concatenate([x.reshape(count, -1) for x in runs], axis=-1).ravel()


def _blocks(leaf: LeafInfo, stages: dict[str, Arrays]) -> list[tuple[bool, Arrays]]:
    """The stages of each run of a parameter's blocks, and whether they are (batch, in, out)."""
    view = leaf.matrix
    cut = {stage: view.to_matrices(xs[leaf.name]) for stage, xs in stages.items()}
    blocks = zip(*cut.values(), strict=True)
    return [(view.transposed, dict(zip(cut, parts, strict=True))) for parts in blocks]


def _map(function: Callable[[Arrays], Any], blocks: Sequence[Arrays]) -> list[Any]:
    """``function`` of each of the blocks, of one shape, in a program that contains it once."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(blocks))
    if len(blocks) == 1 or not traced:
        return [function(block) for block in blocks]
    indices = jnp.arange(len(blocks))
    results = jax.lax.map(lambda i: function(pick(i, blocks)), indices)
    return [jax.tree.map(operator.itemgetter(i), results) for i in range(len(blocks))]
