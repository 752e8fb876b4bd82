"""Shapes of parameters on a mesh of simulated devices; nothing is allocated."""

import collections
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def simulated(text: str) -> Mesh:
    """Makes the mesh that ``"data=4,model=2"`` describes, of simulated CPU devices.

    Call it before JAX uses any device, unless JAX has the right number of them already.
    """
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        raise SystemExit(f"A mesh is written as data=4,model=2, not as {text!r}.")
    axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    count = math.prod(axes.values())
    if jax.config.jax_num_cpu_devices != count:  # ty: ignore[missing-attribute]
        jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def placed(shapes: Any, mesh: Mesh, spec: str) -> Any:
    """Gives shapes their shardings: ``spec`` for matrices, everything else replicated.

    Experts, of leaves ``(experts, in, out)``, are cut in the same way.
    """

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        batch: list[None] = [None] * (len(x.shape) - 2)
        cuts = _matrix_cuts(x.shape[-2:], spec.split(","), mesh) if len(x.shape) > 1 else []
        sharding = NamedSharding(mesh, PartitionSpec(*batch, *cuts))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, shapes)


def _matrix_cuts(
    shape: tuple[int, ...], axes: Sequence[str], mesh: Mesh
) -> list[tuple[str, ...] | None]:
    """Cuts axis i of a matrix along ``axes[i]`` if that divides it, and else the other axis.

    JAX cannot cut an axis into unequal parts.
    """
    cuts: list[tuple[str, ...]] = [(), ()]
    for i, name in enumerate(axes):
        for side in (i, 1 - i) if name != "-" else ():
            parts = math.prod(mesh.shape[cut] for cut in (*cuts[side], name))
            if shape[side] % parts == 0:
                cuts[side] += (name,)
                break
    return [names or None for names in cuts]


def placed_state(state: Any, params: Any) -> Any:
    """Places state leaves that mirror a parameter like that parameter; replicates the others.

    Without a mesh nothing is changed.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    if not isinstance(sharding := next(iter(by_path.values())).sharding, NamedSharding):
        return state
    replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def with_sharding(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        candidates = (by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path)
        param = next(candidates, None)
        mirrors = param is not None and param.shape == x.shape
        place = param.sharding if mirrors else replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(with_sharding, state)


def described(params: Any) -> list[str]:
    """Writes a line for each shape of matrices: how many there are, and how they are cut."""
    kinds = collections.Counter((x.shape, x.sharding.spec) for x in _matrices(params))
    return [
        f"{n} of {' x '.join(map(str, shape))}, cut along {' and '.join(map(_along, spec))}"
        for (shape, spec), n in kinds.items()
    ]


def _matrices(params: Any) -> list[jax.ShapeDtypeStruct]:
    """Lists the leaves that hold matrices; scales of scanned layers lie beside those of one."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [x for path, x in leaves if len(x.shape) - (path[0].key == "blocks") > 1]


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
    for x in _matrices(params):
        shard = Fraction(math.prod(x.sharding.shard_shape(x.shape)), x.size)
        even = Fraction(1, x.sharding.mesh.size)  # a device's even share of all matrices
        total += x.dtype.itemsize * x.size * ((1 - shard) * even + shard * (1 - even))
    return math.ceil(total)
