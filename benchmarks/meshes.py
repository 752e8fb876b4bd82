"""Parameters as shapes on a mesh of simulated devices: nothing is allocated."""

import collections
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def simulated(text: str) -> Mesh:
    """The mesh that ``"data=4,model=2"`` describes, on as many simulated devices as it takes.

    JAX must not have used any device before, unless it has as many already.
    """
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    count = math.prod(sizes.values())
    if jax.config.jax_num_cpu_devices != count:  # ty: ignore[missing-attribute]
        jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def placed(shapes: Any, mesh: Mesh, spec: str) -> Any:
    """``shapes`` with shardings: matrices as ``spec`` says, all else a copy on each device."""
    axes = spec.split(",")

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        own = _cuts(x.shape, axes, mesh) if len(x.shape) == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, own))

    return jax.tree.map(place, shapes)


def _cuts(shape: tuple[int, ...], axes: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """Axis i of a matrix cut along ``axes[i]``, or the other one if only that divides.

    ``jax`` refuses to cut an axis that does not divide.
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
    """``state`` with what has a parameter's path and shape placed as that parameter."""
    homes = dict(jax.tree_util.tree_leaves_with_path(params))
    mesh = next(iter(homes.values())).sharding.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        found = (homes[path[i:]] for i in range(len(path)) if path[i:] in homes)
        home = next(found, None)
        own = home.sharding if home is not None and home.shape == x.shape else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

    return jax.tree_util.tree_map_with_path(place, state)


def described(params: Any) -> list[str]:
    """For each shape of matrices how many there are and how they are cut."""
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
    """What a device receives at least, where N devices share the work on whole matrices evenly.

    It receives the shards that it lacks of the 1/N that it works on, and then, of its own shards of
    all matrices, those that it has not made itself. Where a matrix is not replicated this is: each
    shard leaves once and returns once.
    """
    total = Fraction(0)
    for x in jax.tree.leaves(params):
        if len(x.shape) == 2:
            devices = x.sharding.mesh.size
            shard = Fraction(math.prod(x.sharding.shard_shape(x.shape)), math.prod(x.shape))
            home = shard * (1 - Fraction(1, devices))
            total += x.dtype.itemsize * x.size * ((1 - shard) / devices + home)
    return math.ceil(total)
