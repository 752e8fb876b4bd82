"""The device mesh, and a table that maps parameters to its axes."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.models.layers import RULES as RULES
from examples.trainer.models.layers import shard_count as shard_count
from examples.trainer.models.layers import spec
from examples.trainer.system.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")

# Maps the end of a parameter's path to the logical axes of its dimensions; the first match wins.
# Paths of the optimizer's moments end in the same way. None: never sharded. Stacked blocks
# (--model.scan) have a leading layer axis, which is never sharded.
LOGICAL_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"wte/embedding", ("vocab", "embed")),
    (r"wpe/embedding", (None, "embed")),
    (r"attn/(qkv|query|key|value)/kernel", ("embed", "heads")),
    (r"attn/(qkv|query|key|value)/bias", ("heads",)),
    (r"attn/out/kernel", ("heads", "embed")),
    (r"mlp/(gate|up)/kernel", ("embed", "mlp")),
    (r"mlp/(gate|up)/bias", ("mlp",)),
    (r"mlp/down/kernel", ("mlp", "embed")),
    (r"lm_head/kernel", ("embed", "vocab")),
    (r"(attn/out|mlp/down)/bias|(ln|norm)_\w+/(scale|bias)", (None,)),  # small
)


def make_mesh(flag: str, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of all devices that `--mesh` describes, e.g. `data=2,fsdp=4`."""
    sizes = mesh_sizes(flag, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


def mesh_sizes(flag: str, n_devices: int) -> dict[str, int]:
    """The size of each axis; unnamed axes have size 1, and `""` puts all devices on fsdp."""
    given = parse(flag) if flag else {"fsdp": n_devices}
    product = math.prod(given.values())
    if product != n_devices:
        others = {axis: size for axis, size in given.items() if axis != "fsdp"}
        rest, remainder = divmod(n_devices, math.prod(others.values()))
        fit = {"fsdp": n_devices} if remainder else {**others, "fsdp": rest}
        suggestion = ",".join(f"{axis}={size}" for axis, size in fit.items())
        raise UserError(
            f"--mesh {flag} is for {product} devices, but there "
            f"{'is' if n_devices == 1 else 'are'} {n_devices}: --mesh {suggestion} fits, "
            "for example."
        )
    return {axis: given.get(axis, 1) for axis in MESH_AXES}


def parse(flag: str) -> dict[str, int]:
    """The axes and sizes of `--mesh`, in the order given."""
    sizes: dict[str, int] = {}
    for part in flag.split(","):
        axis, _, size = part.strip().partition("=")
        wrong = {
            f"{part!r} names no axis": axis not in MESH_AXES,
            f"{axis} is given twice": axis in sizes,
            f"{axis} has the size {size!r}": not (size.isdecimal() and int(size) > 0),
        }
        if any(wrong.values()):
            raise UserError(
                f"--mesh {flag}: {next(filter(wrong.get, wrong))}; give 1 or more devices for some "
                f"of {', '.join(MESH_AXES)}, each once, for example --mesh data=2,fsdp=4."
            )
        sizes[axis] = int(size)
    return sizes


def logical_axes(path: str) -> tuple[str | None, ...] | None:
    """The logical axes of the parameter at the end of a path; None if there is none."""
    for pattern, axes in LOGICAL_AXES:
        if re.search(rf"(^|/)({pattern})$", path):
            return (None, *axes) if re.search(r"(^|/)blocks/\D", path) else axes
    return None


def of_params(params: Any, mesh: Mesh) -> Any:

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = logical_axes(name)
        if axes is None or len(axes) != len(x.shape):
            raise UserError(
                f"the parameter {name} of shape {x.shape} has no row in LOGICAL_AXES of "
                "examples/trainer/training/sharding.py: add one that names its dimensions."
            )
        return NamedSharding(mesh, spec(axes, x.shape, mesh))

    return jax.tree.map_with_path(sharding, params)


def of_state(state: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a state: moments like their parameter, the rest replicated."""

    def sharding(path: Any, x: Any) -> NamedSharding:
        axes = logical_axes(jax.tree_util.keystr(path, simple=True, separator="/"))
        if axes is None or len(axes) != len(x.shape):
            return replicated(mesh)
        return NamedSharding(mesh, spec(axes, x.shape, mesh))

    return jax.tree.map_with_path(sharding, state)


def abstract(shapes: Any, shardings: Any) -> Any:
    """The shapes, types and shardings of arrays that need not be made."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def of_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows are sharded, the tokens of a row stay together."""
    return NamedSharding(mesh, P(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def undivided(params: Any, mesh: Mesh) -> list[str]:
    """A line for each kind of dimension that the mesh does not divide and that stays whole."""
    found: dict[tuple[str, int], list[str]] = {}
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for axis, size in zip(logical_axes(name) or (), x.shape, strict=True):
            if axis and size % shard_count(mesh, RULES[axis]):
                found.setdefault((axis, size), []).append(name)
    return [
        f"{axis} dimensions of {size} are not sharded, as {'x'.join(RULES[axis])}="
        f"{shard_count(mesh, RULES[axis])} does not divide them: "
        f"whole in {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"
        for (axis, size), names in found.items()
    ]


def describe(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    processes = jax.process_count()
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return (
        f"{mesh.size} {kind} devices{f' in {processes} processes' if processes > 1 else ''}, {axes}"
    )
