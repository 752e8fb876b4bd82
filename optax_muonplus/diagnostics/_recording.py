"""A transformation that also keeps measures of the matrices it works on in its state.

What a recorder looks at is a :class:`Probe`'s affair; when, of which matrices, and where the
numbers go, is decided here. The state holds arrays only, and as many whatever the parameters, so
that it passes through donation, checkpoints and ``optax.tree.map_params`` like any other.
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

from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._xla.loops import pick
from optax_muonplus.diagnostics._measures import Measure, measure, measures_by_stage
from optax_muonplus.matrices._normalization import Norm

# Number of the update, from 1, to whether it is recorded.
Schedule = Callable[[Any], Any]
Arrays = dict[str, jax.Array]


class Probe(NamedTuple):
    """What a recorder looks at: a few stages of the way from gradient to update.

    Attributes:
      stages: their names, in order; see ``measures``.
      capture: from leaves, updates, the inner state before the update and the updates after it to
        arrays by path. Part of every update, so that it should be there anyway.
      unfold: from leaves and what was captured to the arrays of each stage by path. Part of
        recorded updates only.
      norm: the normalization that follows the second stage.
      norm_eps: its floor.
    """

    stages: tuple[str, ...]
    capture: Callable[[Sequence[LeafInfo], Any, Any, Any], Any]
    unfold: Callable[[Sequence[LeafInfo], Any], dict[str, Arrays]]
    norm: Norm = "none"
    norm_eps: Any = 0.0


class RecordState(NamedTuple):
    """State of a recorder.

    Attributes:
      inner: state of the transformation that is recorded.
      count: number of updates so far.
      step: the update that ``values`` are of; -1 before the first.
      values: by stage and measure, one number for each matrix; NaN before the first.
      names: JSON, as bytes, of the paths and the number of matrices in each. An array, since text
        would not pass through ``jax.jit`` and checkpoints, nor keys for each path through
        ``optax.tree.map_params``.
    """

    inner: Any
    count: Any
    step: Any
    values: dict[str, Arrays]
    names: jax.Array


def record(
    inner: optax.GradientTransformation,
    probe: Probe,
    find: Callable[[Any], Sequence[LeafInfo]],
    due: Schedule,
    measures: Sequence[Measure],
) -> optax.GradientTransformationExtraArgs:
    """``inner``, with ``measures`` of what ``probe`` sees kept in a :class:`RecordState`.

    Args:
      inner: its updates are handed on as they are.
      probe: see there.
      find: from a tree of parameters or updates to the matrices to look at.
      due: see :data:`Schedule`.
      measures: words of :data:`Measure`.
    """
    inner = optax.with_extra_args_support(inner)
    kept = measures_by_stage(probe.stages, measures)

    def init_fn(params: optax.Params) -> Any:
        leaves = find(params)
        total = sum(math.prod(leaf.matrix.batch_shape) for leaf in leaves)
        nothing = jnp.full([total], jnp.nan, jnp.float32)
        names = json.dumps({leaf.name: leaf.matrix.batch_shape for leaf in leaves}).encode()
        return RecordState(
            inner.init(params),
            jnp.zeros([], jnp.int32),
            jnp.full([], -1, jnp.int32),
            {stage: dict.fromkeys(words, nothing) for stage, words in kept.items()},
            jnp.asarray(list(names), jnp.uint8),
        )

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if not isinstance(state, RecordState):
            raise ValueError(
                f"Got a {type(state).__name__}, the state of an optimizer that does not record. To"
                " record from here on pass tx.init(params)._replace(inner=state); to stop, go on"
                " with state.inner."
            )
        done, inner_state = inner.update(updates, state.inner, params, **extra_args)
        count = optax.safe_increment(state.count)
        leaves = find(updates)
        captured = probe.capture(leaves, updates, state.inner, done)
        now = jnp.asarray(due(count), bool)

        def measured(captured: Any) -> dict[str, Arrays]:
            stages = probe.unfold(leaves, captured)
            numbers = functools.partial(_measured, probe, leaves, measures)
            return _left_to_the_compiler(numbers, stages, jnp.asarray(probe.norm_eps))

        values = _where(now, measured, state.values, captured) if leaves else state.values
        step = jnp.where(now, count, state.step)
        return done, RecordState(inner_state, count, step, values, state.names)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _where(now: jax.Array, measured: Callable[[Any], Any], values: Any, captured: Any) -> Any:
    """``measured(captured)``, which is not computed otherwise, or else ``values``."""
    if not isinstance(now, jax.core.Tracer):  # outside of jit a branch would be compiled each time
        return measured(captured) if now else values
    return jax.lax.cond(now, lambda old, x: measured(x), lambda old, x: old, values, captured)


def _left_to_the_compiler(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; along Explicit axes of a mesh types would forbid most reshapes."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not explicit:
        return function(*args)
    whole = NamedSharding(explicit[0], PartitionSpec())
    return jax.sharding.auto_axes(function, out_sharding=whole)(*args)


def _measured(
    probe: Probe,
    leaves: Sequence[LeafInfo],
    measures: Sequence[Measure],
    stages: dict[str, Arrays],
    norm_eps: jax.Array,
) -> dict[str, Arrays]:
    """By stage and measure, one number for each matrix of all leaves."""
    owned = [_blocks(leaf, stages) for leaf in leaves]
    blocks = [block for own in owned for block in own]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (transposed, block) in enumerate(blocks):
        key = (transposed, *((x.shape, x.dtype) for x in block.values()))
        groups.setdefault(key, []).append(i)

    def numbers(transposed: bool, block: Arrays) -> dict[str, Arrays]:
        upright = {k: jnp.swapaxes(x, -1, -2) if transposed else x for k, x in block.items()}
        return measure(upright, probe.stages, measures, probe.norm, norm_eps)

    done: dict[int, Any] = {}
    for (transposed, *_), members in groups.items():
        function = functools.partial(numbers, transposed)
        done |= zip(members, _each(function, [blocks[i][1] for i in members]), strict=True)
    in_order = iter(done[i] for i in range(len(blocks)))
    parts = [[next(in_order) for _ in own] for own in owned]
    joined = [jax.tree.map(lambda *xs: jnp.stack(xs, axis=-1).ravel(), *own) for own in parts]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *joined)


def _blocks(leaf: LeafInfo, stages: dict[str, Arrays]) -> list[tuple[bool, Arrays]]:
    """The stages of each block of a parameter, and whether they lie as (batch, in, out)."""
    view = leaf.matrix
    cut = {stage: view.to_matrices(xs[leaf.name]) for stage, xs in stages.items()}
    every = zip(*cut.values(), strict=True)
    return [(view.transposed, dict(zip(cut, parts, strict=True))) for parts in every]


def _each(function: Callable[[Arrays], Any], blocks: Sequence[Arrays]) -> list[Any]:
    """``function`` of each of the blocks, of one shape, in a program that holds it once."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(blocks))
    if len(blocks) == 1 or not traced:
        return [function(block) for block in blocks]
    indices = jnp.arange(len(blocks))
    done = jax.lax.map(lambda i: function(pick(i, blocks)), indices)
    return [jax.tree.map(operator.itemgetter(i), done) for i in range(len(blocks))]
