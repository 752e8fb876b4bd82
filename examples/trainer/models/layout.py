"""Where arrays lie on the devices of a mesh, by the names of their axes.

Parameters and activations have the same names: `embed` is the width of the residual stream in
parameters, which fsdp shards; activations have their rows sharded instead.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Maps the name of an axis to the mesh axes that shard it.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
}

# Axes of which shards may be uneven. Rows may not: those of a batch of 1 would be on one device.
UNEVEN = ("mlp", "vocab")

Axes = tuple[str | None, ...]
"""The name of each axis of an array; None is never sharded."""


def shard_count(mesh: Mesh, axes: Sequence[str]) -> int:
    """The number of shards along the given mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def spec(axes: Axes, shape: tuple[int, ...], mesh: Mesh, uneven: bool = False) -> P:
    """The partition spec of an array; a dimension that the mesh does not divide is not sharded.

    With `uneven`, dimensions inside a layer are, unless that would waste 1/16 of the work. Only
    arrays inside a program can have such shards.
    """

    def mesh_axes(axis: str | None, size: int) -> tuple[str, ...] | None:
        on = RULES[axis] if axis else ()
        n = shard_count(mesh, on)
        wasteful = axis not in UNEVEN or size < 16 * n
        return None if not on or (size % n and (not uneven or wasteful)) else on

    return P(*map(mesh_axes, axes, shape))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Puts the arrays of a model on a mesh; None, or a mesh of one device, leaves them alone.

    The compiler would otherwise choose, and in a loop over layers it chooses badly: all rows on
    every device.
    """

    mesh: Mesh | None = None

    @property
    def devices(self) -> int:
        return self.mesh.size if self.mesh else 1

    @property
    def platform(self) -> str:
        """What the devices are: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform if self.mesh else jax.default_backend()

    @property
    def is_here(self) -> bool:
        """Whether a device can be used by this process, not only compiled for."""
        return not self.mesh or bool(set(self.mesh.devices.flat).intersection(jax.local_devices()))

    def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, whose axes have these names, sharded accordingly."""
        if self.mesh is None or self.devices == 1:
            return x
        placed = NamedSharding(self.mesh, spec(axes, x.shape, self.mesh, uneven=True))
        return jax.lax.with_sharding_constraint(x, placed)

    def gather(self, shard: jax.Array, *axes: str | None) -> jax.Array:
        """A parameter as the product with it needs it: whole along fsdp."""
        return self.place(shard, *(None if axis == "embed" else axis for axis in axes))

    def divide(
        self, function: Callable[..., jax.Array], axes: Axes, *arrays: jax.Array
    ) -> jax.Array:
        """`function` of arrays of one shape, computed by each device for its own shards.

        The result has the axes of the arrays; only those that no mesh axis shards may differ in
        size. Later arrays may have the first of these axes only. No device needs the shards of
        another.
        """
        if self.mesh is None or self.devices == 1:
            return function(*arrays)
        one = spec(axes, arrays[0].shape, self.mesh)
        each = tuple(P(*one[: x.ndim]) for x in arrays)
        # Kernels do not say along which mesh axes their results differ, so that is not checked.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=each, out_specs=one, check_vma=False
        )(*arrays)


ONE_DEVICE = Layout()
