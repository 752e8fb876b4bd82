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
    replica_sum_dtype: str = "float32"
    """In which replicas add their gradients."""

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

    @property
    def has_rounded_sums(self) -> bool:
        """Whether there are replicas, and they add gradients in another type than float32."""
        several = self.mesh is not None and self.mesh.shape["data"] > 1
        return several and self.replica_sum_dtype != "float32"

    def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, whose axes have these names, sharded accordingly."""
        if self.mesh is None or self.devices == 1:
            return x
        placed = NamedSharding(self.mesh, spec(axes, x.shape, self.mesh, uneven=True))
        return jax.lax.with_sharding_constraint(x, placed)

    def gather(self, shard: jax.Array, *axes: str | None) -> jax.Array:
        """A parameter as the product with it needs it: whole along fsdp."""
        return self.place(shard, *(None if axis == "embed" else axis for axis in axes))

    def sum_of_rows(
        self, function: Callable[..., jax.Array], axes: Axes, *rows: tuple[jax.Array, Axes]
    ) -> jax.Array:
        """`function` of arrays of rows with their axes: a sum over rows, in float32.

        Each device calls it with its rows. The results are added in float32 along fsdp, where links
        are fast, and along data in `replica_sum_dtype`. Each keeps its shard, as `axes` say.
        """
        arrays = [x for x, _ in rows]
        if not self.rounds_sums(len(arrays[0])):
            return self.place(function(*arrays), *axes)
        assert self.mesh is not None
        out = spec(axes, jax.eval_shape(function, *arrays).shape, self.mesh)
        cut = next((i for i, on in enumerate(out) if on and "fsdp" in on), None)
        return jax.shard_map(
            lambda *arrays: self.sum_of_parts(function(*arrays), cut),
            mesh=self.mesh,
            in_specs=tuple(spec(names, x.shape, self.mesh) for x, names in rows),
            out_specs=out,
            check_vma=False,
        )(*arrays)

    def rounds_sums(self, rows: int) -> bool:
        """The same for gradients of so many rows, which all devices must share."""
        even = self.mesh is not None and rows % shard_count(self.mesh, RULES["batch"]) == 0
        return even and self.has_rounded_sums

    def sum_of_parts(self, part: jax.Array, cut: int | None) -> jax.Array:
        """Inside of `shard_map`: the sum of the devices' parts, sharded along the axis `cut`."""
        if self.devices == 1:
            return part
        axes = RULES["batch"]
        if cut is not None:
            part = jax.lax.psum_scatter(part, "fsdp", scatter_dimension=cut, tiled=True)
            axes = ("data",)
        if not self.has_rounded_sums:
            return jax.lax.psum(part, axes)
        part = part if cut is not None else jax.lax.psum(part, "fsdp")
        return jax.lax.psum(part.astype(self.replica_sum_dtype), "data")

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
