"""The device mesh, and a table that maps parameters to its axes."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.models.layers import RULES as RULES
from examples.trainer.models.layers import Axes, spec
from examples.trainer.models.layers import shard_count as shard_count
from examples.trainer.system.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
REPLICA = "replica"  # in --mesh: another name of data, where parameters are replicated

# Maps the end of a parameter's path to the logical axes of its dimensions; the first match wins.
# Paths of the optimizer's moments end in the same way. None: never sharded. Stacked blocks
# (--model.scan) have a leading layer axis, which is never sharded.
LOGICAL_AXES: tuple[tuple[str, Axes], ...] = (
    (r"wte/embedding", ("vocab", "embed")),
    (r"wpe/embedding", (None, "embed")),
    (r"attn/(qkv|query|key|value)/kernel", ("embed", "heads")),
    (r"attn/qkv/bias", ("heads",)),
    (r"attn/out/kernel", ("heads", "embed")),
    (r"mlp/(gate|up)/kernel", ("embed", "mlp")),
    (r"mlp/up/bias", ("mlp",)),
    (r"mlp/down/kernel", ("mlp", "embed")),
    (r"lm_head/kernel", ("embed", "vocab")),
    (r"(attn/out|mlp/down)/bias|(ln|norm)_\w+/(scale|bias)", (None,)),  # small
)


def make_mesh(flag: str, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of all devices that `--mesh` describes, e.g. `data=2,fsdp=4`.

    Axes that it does not name have the size 1; `""` puts all devices on fsdp.
    """
    sizes = dict.fromkeys(MESH_AXES, 1) | (parse(flag) if flag else {"fsdp": len(devices)})
    if math.prod(sizes.values()) != len(devices):
        raise UserError(
            f"--mesh {flag} is for {math.prod(sizes.values())} devices, but there "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices)}: --mesh fsdp={len(devices)} "
            "fits, for example."
        )
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices
    )


def parse(flag: str) -> dict[str, int]:
    """The axes and sizes of `--mesh`; devices on `data` and on `replica` multiply."""
    given: dict[str, int] = {}
    for part in flag.split(","):
        axis, _, size = part.strip().partition("=")
        known = axis in (*MESH_AXES, REPLICA) and axis not in given
        if not (known and size.isdecimal() and int(size) > 0):
            raise UserError(
                f"--mesh {flag}: {part!r} is none of its parts; give 1 or more devices for some of "
                f"{', '.join(MESH_AXES)} and {REPLICA}, each once, for example data=2,fsdp=4."
            )
        given[axis] = int(size)
    if REPLICA in given:
        given["data"] = given.pop(REPLICA) * given.get("data", 1)
    return given


def sharding_of(path: Any, x: Any, mesh: Mesh) -> NamedSharding | None:
    """The sharding of a parameter, or of a moment of it; None for another array."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, axes in LOGICAL_AXES:
        if re.search(rf"(^|/)({pattern})$", name):
            axes = (None, *axes) if re.search(r"(^|/)blocks/\D", name) else axes
            return NamedSharding(mesh, spec(axes, x.shape, mesh)) if len(axes) == x.ndim else None
    return None


def of_params(params: Any, mesh: Mesh) -> Any:

    def sharding(path: Any, x: Any) -> NamedSharding:
        if found := sharding_of(path, x, mesh):
            return found
        raise UserError(
            f"the parameter {jax.tree_util.keystr(path, simple=True, separator='/')} of shape "
            f"{x.shape} has no row in LOGICAL_AXES of examples/trainer/training/sharding.py: add "
            "one that names its dimensions."
        )

    return jax.tree.map_with_path(sharding, params)


def of_state(state: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a state: moments like their parameter, the rest replicated."""
    return jax.tree.map_with_path(
        lambda path, x: sharding_of(path, x, mesh) or replicated(mesh), state
    )


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


def describe(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    processes = jax.process_count()
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return (
        f"{mesh.size} {kind} devices{f' in {processes} processes' if processes > 1 else ''}, {axes}"
    )
