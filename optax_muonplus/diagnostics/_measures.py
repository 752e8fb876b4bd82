"""Names of the measures of imbalance, and their evaluation at each stage of all matrices.

A stage is the matrix after one of the steps from gradient to update. The step from the first stage
to the second, as a rule the polar one, is what rank correlations and distances are about.
"""

import collections
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_muonplus.diagnostics._imbalance import (
    floor_share,
    norm_ratio,
    norm_variance,
    polar_distance,
    rms,
    spearman,
)
from optax_muonplus.matrices import Normalize, Side, normalize_matrix, normalized_sides
from optax_muonplus.transforms import LeafInfo, MatrixLayout

Measure = Literal[
    "row_variance",
    "col_variance",
    "row_ratio",
    "col_ratio",
    "rms",
    "row_spearman",
    "col_spearman",
    "row_floor_share",
    "col_floor_share",
    "distance",
]
# The measures that are recorded by default: all but the distance, which takes a singular value
# decomposition of every matrix.
MEASURES: tuple[Measure, ...] = get_args(Measure)[:-1]
# By stage and measure.
Values = dict[str, dict[str, jax.Array]]


def _floor_share(before: jax.Array, x: jax.Array, normalization: Normalize, side: Side) -> Any:
    """Computes the floor share just before that side is normalized; NaN if it never is."""
    del before
    for normalized in normalized_sides(normalization.norm, *x.shape[-2:]):
        if normalized == side:
            return floor_share(x, side, normalization.norm_eps)
        x = normalize_matrix(x, normalized, normalization.norm_eps)
    return jnp.full(x.shape[:-2], jnp.nan)


# Measures of one matrix, which are taken at every stage.
AT_EVERY_STAGE: Mapping[str, Callable[..., jax.Array]] = {
    f"{side}_{name}": functools.partial(function, side=side)
    for name, function in (("variance", norm_variance), ("ratio", norm_ratio))
    for side in get_args(Side)
} | {"rms": rms}
# Measures of the first stage, the second one and its normalization, which are kept with the second.
OF_A_STEP: Mapping[str, Callable[..., jax.Array]] = {
    "row_spearman": lambda before, x, _: spearman(before, x, "row"),
    "col_spearman": lambda before, x, _: spearman(before, x, "col"),
    "row_floor_share": functools.partial(_floor_share, side="row"),
    "col_floor_share": functools.partial(_floor_share, side="col"),
    "distance": lambda before, x, _: polar_distance(x, before),
}


def measure(
    taken: Mapping[str, Sequence[Measure]],
    leaves: Sequence[LeafInfo],
    stages: Sequence[Sequence[jax.Array]],
    normalization: Normalize,
) -> Values:
    """Measures all matrices of all leaves, in a program that contains each kind of leaf once.

    ``stages`` are for each stage the arrays of all leaves; ``normalization`` follows the second
    one. The values are one number for each matrix, in float32.
    """

    def of_leaves(by_leaf: Sequence[Sequence[jax.Array]], normalization: Normalize) -> Values:
        of_matrices = functools.partial(_of_matrices, taken, normalization)
        groups = collections.defaultdict(list)
        for i, (leaf, arrays) in enumerate(zip(leaves, by_leaf, strict=True)):
            groups[leaf.matrix, *(x.dtype for x in arrays)].append(i)
        values: dict[int, Values] = {}
        for (layout, *_), members in groups.items():
            of_leaf = functools.partial(_of_leaf, of_matrices, layout)
            values |= zip(members, _map(of_leaf, [by_leaf[i] for i in members]), strict=True)
        return _concatenated([values[i] for i in range(len(leaves))])

    return _with_auto_axes(of_leaves, list(zip(*stages, strict=True)), normalization)


def _with_auto_axes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls with Explicit mesh axes made Auto: types would forbid most reshapes."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    if not explicit:
        return function(*args)
    replicated = NamedSharding(explicit[0], PartitionSpec())
    return jax.sharding.auto_axes(function, out_sharding=replicated)(*args)


def _map(function: Callable[[Any], Values], arguments: Sequence[Any]) -> list[Values]:
    """Calls with each of the arguments, of one shape, in a program that has the function once."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
    if len(arguments) == 1 or not traced:
        return [function(x) for x in arguments]
    # A stack in place of the switch would copy all of them.
    one = [functools.partial(lambda x: x, x) for x in arguments]
    results = jax.lax.map(lambda i: function(jax.lax.switch(i, one)), jnp.arange(len(one)))
    return [jax.tree.map(operator.itemgetter(i), results) for i in range(len(one))]


def _of_leaf(
    of_matrices: Callable[..., Values], layout: MatrixLayout, stages: Sequence[jax.Array]
) -> Values:
    """Returns one number for each matrix of a leaf, in the order of its batch axes and blocks."""
    count = math.prod(layout.shape[axis] for axis in layout.batch_axes)
    each = []
    for run in zip(*(layout.to_matrices(x) for x in stages), strict=True):
        values = of_matrices([jnp.swapaxes(x, -1, -2) if layout.transposed else x for x in run])
        each.append(jax.tree.map(lambda x: x.reshape(count, -1), values))
    return jax.tree.map(jnp.ravel, _concatenated(each))


def _concatenated(values: Sequence[Values]) -> Values:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=-1), *values)


def _of_matrices(
    taken: Mapping[str, Sequence[Measure]], normalization: Normalize, stages: Sequence[jax.Array]
) -> Values:
    """Measures matrices ``(batch, out, in)`` at each stage."""
    step = *stages[:2], normalization

    def evaluate(name: Measure, x: jax.Array) -> jax.Array:
        value = AT_EVERY_STAGE[name](x) if name in AT_EVERY_STAGE else OF_A_STEP[name](*step)
        return value.astype(jnp.float32)

    return {
        stage: {name: evaluate(name, x) for name in names}
        for (stage, names), x in zip(taken.items(), stages, strict=True)
    }
