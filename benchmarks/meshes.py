"""Shapes of parameters on a mesh of simulated devices; nothing is allocated."""

import collections
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def simulated(text: str) -> Mesh:
    """Makes the mesh that ``"data=4,model=2"`` describes, of simulated CPU devices.

    Call it before JAX uses any device, unless JAX has the right number of them already.
    """
    axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    count = math.prod(axes.values())
    if jax.config.jax_num_cpu_devices != count:  # ty: ignore[missing-attribute]
        jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def placed(shapes: Any, mesh: Mesh, spec: str) -> Any:
    """Gives shapes their shardings: matrices as ``spec`` says, everything else replicated."""
    axes = spec.split(",")

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = _matrix_spec(x.shape, axes, mesh) if len(x.shape) == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes)


def _matrix_spec(shape: tuple[int, ...], axes: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """Axis i of a matrix is cut along ``axes[i]`` where that divides it, else the other axis is.

    JAX cannot cut an axis into unequal parts.
    """
    cuts: list[tuple[str, ...]] = [(), ()]
    for i, name in enumerate(axes):
        for side in (i, 1 - i) if name != "-" else ():
            parts = math.prod(mesh.shape[cut] for cut in (*cuts[side], name))
            if shape[side] % parts == 0:
                cuts[side] += (name,)
                break
    return PartitionSpec(*(names or None for names in cuts))


def placed_state(state: Any, params: Any) -> Any:
    """Shards state leaves that mirror a parameter like that parameter; replicates the others.

    Without a mesh nothing is changed.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    if not isinstance(sharding := next(iter(by_path.values())).sharding, NamedSharding):
        return state
    replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        candidates = (by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path)
        param = next(candidates, None)
        mirrors = param is not None and param.shape == x.shape
        sharding = param.sharding if mirrors else replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, state)


def described(params: Any) -> list[str]:
    """Writes a line for each shape of matrices: how many there are, and how they are cut."""
    kinds = collections.Counter(
        (x.shape, x.sharding.spec) for x in jax.tree.leaves(params) if len(x.shape) == 2
    )
    return [
        f"{n} of {rows} x {columns}, cut along {' and '.join(_along(names) for names in spec)}"
        for ((rows, columns), spec), n in kinds.items()
    ]


def _along(names: str | tuple[str, ...] | None) -> str:
    names = (names,) if isinstance(names, str) else names or ("nothing",)
    return " x ".join(names)


def fewest_bytes(params: Any) -> int:
    """Counts what a device receives at least if N devices share the work on matrices evenly.

    A device works on 1/N of the matrices and receives the shards of them that it lacks. Afterwards
    it receives its shards of all other matrices' results. If no matrix is replicated, each shard
    is sent once to the device that works on it, and once back.
    """
    total = Fraction(0)
    for x in jax.tree.leaves(params):
        if len(x.shape) == 2:
            devices = x.sharding.mesh.size
            shard = Fraction(math.prod(x.sharding.shard_shape(x.shape)), math.prod(x.shape))
            inputs = (1 - shard) / devices
            results = shard * (1 - Fraction(1, devices))
            total += x.dtype.itemsize * x.size * (inputs + results)
    return math.ceil(total)
