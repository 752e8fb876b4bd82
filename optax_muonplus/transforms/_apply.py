"""The one place where functions on matrices become transformations of a tree of parameters.

Each leaf is looked up once at init and once at an update. This module takes the matrices out of the
leaves and puts the results back, in the right dtype. ``_execution`` runs the functions.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._arguments import supported
from optax_muonplus._execution.batches import READ_ONE, MatrixBatch, Read, dtypes_of
from optax_muonplus._execution.batching import apply_batched
from optax_muonplus._execution.sharded import apply_sharded
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.gradients import beside_updates, check_gradients
from optax_muonplus._parameters.leaves import (
    LeafInfo,
    ResolvedTree,
    check_inexact,
    check_only_matrices,
    resolve,
)
from optax_muonplus._parameters.sharding import ShardingTree, check_given_shardings
from optax_muonplus._parameters.state_sharding import shard_like_params
from optax_muonplus._xla.loops import Sources
from optax_muonplus.matrices._matrix_function import MatrixFunction, compose
from optax_muonplus.matrices._precision import narrowed
from optax_muonplus.transforms._state_check import update_own_state


class MatrixTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of trees whose leaves all are matrices.

    Attributes:
      make: from the records of the leaves to the transformation for them. An optimizer that has
        looked up the leaves of the whole tree calls it, in place of looking them up again.
    takes_factor: whether ``make`` takes a number too, which multiplies the updates where they are
      made: a learning rate then needs no memory, and no pass over the updates.
    """

    make: Callable[..., optax.GradientTransformation]
    takes_factor: bool


def for_matrices(
    make: Callable[..., optax.GradientTransformation],
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    takes_factor: bool = False,
) -> MatrixTransformation:
    """The transformation that ``make`` gives for a tree of matrices.

    Args:
      make: see :class:`MatrixTransformation`.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise. The state is sharded like the parameters.
      takes_factor: see :class:`MatrixTransformation`.
    """

    def make_for_tree(tree: ResolvedTree) -> optax.GradientTransformation:
        check_only_matrices(tree.leaves)
        return make(tree.leaves)

    transformation = MatrixTransformation(*for_resolved(make_for_tree, dimension_numbers, sharding))
    transformation.make = make
    transformation.takes_factor = takes_factor
    return transformation


def for_resolved(
    make: Callable[[ResolvedTree], optax.GradientTransformation],
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that knows what each leaf is.

    Leaves are looked up anew on the whole tree at init and at every update, by path and shape: the
    containers may differ between the two (``flax.nnx.Optimizer`` gives variables first and plain
    arrays later), and no tree of labels is kept.

    Args:
      make: from a tree with the records of its leaves to the transformation for it.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise. The state is sharded like the parameters.
    """

    def init_fn(params: optax.Params) -> optax.OptState:
        tree = resolve(params, dimension_numbers, sharding)
        check_inexact(tree.leaves)
        state = make(tree).init(params)
        given = [leaf.given_sharding for leaf in tree.leaves]
        tree.all_shardings()  # raises for those that do not fit
        check_given_shardings([leaf.name for leaf in tree.leaves], tree.arrays, given)
        paths, shapes = [x.path for x in tree.leaves], [x.shape for x in tree.leaves]
        return shard_like_params(state, paths, shapes, given)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        check_gradients(updates, params)
        tree = resolve(updates, dimension_numbers, sharding)
        inner = optax.with_extra_args_support(make(tree))
        params = beside_updates(updates, params)
        return update_own_state(inner, updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def matrix_link(
    functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]
) -> optax.GradientTransformation:
    """A stateless transformation that applies ``functions`` to every matrix of ``leaves``."""

    def init_fn(params: optax.Params) -> optax.OptState:
        del params
        check_function(functions, leaves)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        arrays, treedef = jax.tree.flatten(updates)
        return treedef.unflatten(apply_to_arrays(functions, arrays, leaves)), state

    return optax.GradientTransformation(init_fn, update_fn)


def apply_to_arrays(
    functions: Sequence[MatrixFunction],
    arrays: Sequence[Any],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix of every array.

    Args:
      functions: functions of matrices.
      arrays: of the shapes and shardings of ``leaves``; their dtypes may differ.
      leaves: records of matrices.

    Returns:
      One array for each of ``arrays``, of the same shape and sharding, in the dtype of its leaf.
    """
    return apply_to_sources(functions, READ_ONE, [(jnp.asarray(x),) for x in arrays], leaves)


def apply_to_sources(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """Applies ``functions`` to matrices that are made of several arrays, where they are read.

    Args:
      functions: functions of matrices.
      read: an elementwise function from the arrays in a tuple to the parameter's matrices.
      sources: for each leaf a tuple of arrays of its shape and sharding.
      leaves: records of matrices.

    Returns:
      As :func:`apply_to_arrays`.
    """
    results: dict[int, jax.Array] = {}
    for apply, on_mesh in ((_apply_local, False), (apply_sharded, True)):
        members = [i for i, leaf in enumerate(leaves) if (leaf.sharding is not None) == on_mesh]
        if members:
            inputs, records = [sources[i] for i in members], [leaves[i] for i in members]
            results |= zip(members, apply(functions, read, inputs, records), strict=True)
    return [narrowed(results[i], leaf.dtype) for i, leaf in enumerate(leaves)]


def with_dtypes(leaves: Sequence[LeafInfo], dtypes: Sequence[Any]) -> list[LeafInfo]:
    """``leaves`` with other dtypes, so that results are not rounded to the leaves' own."""
    return [leaf._replace(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _apply_local(
    functions: Sequence[MatrixFunction],
    read: Read,
    sources: Sequence[Sources],
    leaves: Sequence[LeafInfo],
) -> list[jax.Array]:
    """On one device, or as the compiler distributes it."""
    batches: list[MatrixBatch] = []
    stops = []
    for arrays, dtype, leaf in zip(sources, dtypes_of(read, sources), leaves, strict=True):
        view = leaf.matrix
        blocks = zip(*(view.to_matrices(x) for x in arrays), strict=True)
        batches += [MatrixBatch(x, view.transposed, dtype, leaf.dtype, read) for x in blocks]
        stops.append(len(batches))
    outputs = apply_batched(functions, batches)
    return [
        leaf.matrix.from_matrices(outputs[start:stop])
        for leaf, (start, stop) in zip(leaves, itertools.pairwise([0, *stops]), strict=True)
    ]


def check_function(functions: Sequence[MatrixFunction], leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless ``functions`` are defined, and keep the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once.
    """
    function = compose(functions)
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for leaf in leaves:
        for shape in leaf.matrix.block_shapes():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, leaf.dtype), leaf.name)
    for probe, name in shapes.items():
        try:
            result = jax.eval_shape(lambda x: function(x), probe)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if getattr(result, "shape", None) != probe.shape:
            raise ValueError(
                f"{name}: a function on matrices must map arrays (*batch, out, in) to arrays of the"
                f" same shape; for {probe.shape} it gave {getattr(result, 'shape', result)}."
            )
        complex_only_now = jnp.iscomplexobj(result) and not jnp.iscomplexobj(probe)
        if not supported(result.dtype) or complex_only_now:
            raise ValueError(
                f"{name}: a function on matrices must map floating-point arrays to such, and real"
                f" ones to real ones; for {probe.dtype} it gave {result.dtype}. Cast its result."
            )
