"""The device mesh, and a table that maps parameters to its axes.

Rows of a batch lie along `data` and `fsdp`. `fsdp` shards parameters too, along the width of the
residual stream, and `tensor` along words, heads and the width inside an MLP.

Networks are written without a mesh. `on(mesh)` is the context in which they are traced: there a
block gathers its parameters in the dtype of the activations just before it needs them, so that a
device holds one whole layer at a time, and gradients go back to the shards.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.system.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # they share the rows of a batch
Axes = tuple[str | tuple[str, ...] | None, ...]
"""The mesh axes along which each dimension of an array is sharded."""

# Maps the end of a parameter's path to the mesh axes of its dimensions; the first match wins. Paths
# of the optimizer's moments end in the same way. Stacked blocks (--model.scan) have a leading layer
# axis, which is never sharded.
PARAMETERS: tuple[tuple[str, Axes], ...] = (
    (r"wte/embedding|(attn/out|mlp/down)/kernel", ("tensor", "fsdp")),
    (r"wpe/embedding", (None, "fsdp")),
    (r"(attn/(qkv|query|key|value)|mlp/(gate|up)|lm_head)/kernel", ("fsdp", "tensor")),
    (r"(attn/qkv|mlp/up)/bias", ("tensor",)),
    (r"(attn/out|mlp/down)/bias|(ln|norm)_\w+/(scale|bias)", (None,)),  # small
)


def make_mesh(flag: str, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh that `--mesh` describes, e.g. `data=2,fsdp=4`; `""` puts all devices on fsdp."""
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
    """The axes and sizes of `--mesh`."""
    given: dict[str, int] = {}
    for part in flag.split(","):
        axis, _, size = part.strip().partition("=")
        known = axis in MESH_AXES and axis not in given
        if not (known and size.isdecimal() and int(size) > 0):
            raise UserError(
                f"--mesh {flag}: {part!r} is none of its parts; give 1 or more devices for some of "
                f"{', '.join(MESH_AXES)}, each once, for example data=2,fsdp=4."
            )
        given[axis] = int(size)
    return given


def shard_count(mesh: Mesh | AbstractMesh, axis: str | tuple[str, ...] | None) -> int:
    """The number of shards along a mesh axis, or along several."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh.shape[name] for name in names)


def spec(axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, uneven: bool = False) -> P:
    """The partition spec of an array, of which the mesh divides the dimensions that it shards."""
    along = []
    for axis, size in zip(axes, shape, strict=True):
        n = shard_count(mesh, axis)
        fits = size % n == 0 or (uneven and axis == "tensor" and size >= 16 * n)
        along.append(axis if fits else None)
    return P(*along)


def axes_of(path: Any) -> Axes | None:
    """The mesh axes of a parameter, or of a moment of it; None for another array."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, axes in PARAMETERS:
        if re.search(rf"(^|/)({pattern})$", name):
            return (None, *axes) if re.search(r"(^|/)blocks/\D", name) else axes
    return None


def of_params(params: Any, mesh: Mesh) -> Any:
    """The sharding of each parameter; raises `UserError` for one that the table does not name."""
    for path, x in jax.tree.leaves_with_path(params):
        if axes_of(path) is None:
            raise UserError(
                f"the parameter {jax.tree_util.keystr(path, simple=True, separator='/')} of shape "
                f"{x.shape} has no row in PARAMETERS of examples/trainer/models/sharding.py: add "
                "one with the mesh axes of its dimensions."
            )
    return of_state(params, mesh)


def of_state(state: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a state: moments like their parameter, the rest replicated."""

    def sharding(path: Any, x: Any) -> NamedSharding:
        axes = axes_of(path)
        is_known = axes is not None and len(axes) == x.ndim
        return NamedSharding(mesh, spec(axes, x.shape, mesh) if is_known else P())

    return jax.tree.map_with_path(sharding, state)


def abstract(state: Any, mesh: Mesh) -> Any:
    """The shapes, types and shardings of the arrays of a state, which need not be made."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        *(state, of_state(state, mesh)),
    )


def of_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows are sharded, the tokens of a row stay together."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def describe(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    processes = jax.process_count()
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return (
        f"{mesh.size} {kind} devices{f' in {processes} processes' if processes > 1 else ''}, {axes}"
    )


# What networks ask, which are traced in the context of a mesh


def on(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """The context of a mesh for what is traced in it."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def several() -> AbstractMesh | None:
    """The mesh of the context, if it has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def platform() -> str:
    """What the devices of the context are: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def place(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """An activation whose first dimensions are sharded along these mesh axes."""
    if (mesh := several()) is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape[: len(axes)], mesh, uneven=True))


def gathered(params: Any, dtype: Any = None) -> Any:
    """Parameters as products need them: whole along fsdp, and kernels with values of that dtype."""
    if (mesh := several()) is None:
        return params

    def whole(path: Any, x: jax.Array) -> jax.Array:
        axes = axes_of(path)
        if axes is None or path[0] == jax.tree_util.DictKey("blocks"):  # which do so themselves
            return x
        rest = tuple(None if axis == "fsdp" else axis for axis in axes)
        moved = dtype if dtype and x.ndim > 1 else x.dtype
        return gather(x, moved, spec(rest, x.shape, mesh), spec(axes, x.shape, mesh))

    return jax.tree.map_with_path(whole, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(x: jax.Array, dtype: Any, rest: P, shard: P) -> jax.Array:
    """`x`, moved in that dtype; it is float32, as are the sums of its gradients over devices."""
    return jax.lax.with_sharding_constraint(x.astype(dtype), rest).astype(jnp.float32)


def gather_forward(x: jax.Array, dtype: Any, rest: P, shard: P) -> tuple[jax.Array, jax.Array]:
    return gather(x, dtype, rest, shard), jnp.zeros((), x.dtype)


def gather_backward(
    dtype: Any, rest: P, shard: P, kept: jax.Array, dx: jax.Array
) -> tuple[jax.Array]:
    """Without the first of both, XLA would move rows in place of gradients."""
    dx = jax.lax.with_sharding_constraint(dx, rest)
    return (jax.lax.with_sharding_constraint(dx, shard).astype(kept.dtype),)


gather.defvjp(gather_forward, gather_backward)


def gather_again(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether jax.checkpoint keeps a result; kept gathers would be all layers whole on a device."""
    if primitive.name != "custom_vjp_call":
        return True
    return all(e.primitive.name != "sharding_constraint" for e in params["call_jaxpr"].eqns)


def on_shards(function: Callable[..., jax.Array], axes: Axes, *arrays: jax.Array) -> jax.Array:
    """`function` of arrays to one of their shape, by each device for its own shards."""
    if (mesh := several()) is None:
        return function(*arrays)
    one = spec(axes, arrays[0].shape, mesh)
    # Kernels do not say along which mesh axes their results differ, so that is not checked.
    return jax.shard_map(function, in_specs=one, out_specs=one, check_vma=False)(*arrays)
