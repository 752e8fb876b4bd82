"""Where arrays lie on a mesh, and linear layers and embeddings whose parameters are shards.

Axes have names, the same in parameters and activations: `embed` is the width of the residual stream
in parameters, which fsdp shards; activations have their rows sharded instead.

A kernel is gathered in the dtype of the activations just before a product, and again in the
backward pass, so that a device holds one whole layer at a time. Gradients are summed in float32,
within a device and between devices, and only the shard of the sum is kept.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.settings.model import ModelConfig, is_depth_scaled

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


# GPT-2's, the paper's GPT's, and the initializer_range of the LLaMA in Hugging Face transformers.
STD = 0.02
HEAD = ("embed", "vocab")
"""The names of the axes of the matrix from hidden states to logits."""

Norm = nnx.LayerNorm | nnx.RMSNorm


def product(x: jax.Array, kernel: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """`x` (B, T, in) times a kernel (in, out) whose axes have the names `axes`."""
    if layout.devices == 1:  # with derivatives of any order, also forward ones
        return x @ kernel.astype(x.dtype)
    return sharded_product(x, kernel, axes, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sharded_product(x: jax.Array, kernel: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    y = x @ layout.gather(kernel.astype(x.dtype), *axes)
    return layout.place(y, "batch", None, activation(axes[1]))


def product_forward(
    x: jax.Array, kernel: jax.Array, axes: Axes, layout: Layout
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Keeps the shard for the backward pass, not what was gathered."""
    return sharded_product(x, kernel, axes, layout), (x, kernel)


def product_backward(
    axes: Axes, layout: Layout, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    # Otherwise the compiler would take this gather and the earlier one for the same, and keep all
    # layers from one to the other.
    kernel, dy = jax.lax.optimization_barrier((kernel, dy))
    dx = dy @ layout.gather(kernel.astype(x.dtype), *axes).T
    dk = jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)
    dx = layout.place(dx, "batch", None, activation(axes[0]))
    return dx, layout.place(dk, *axes).astype(kernel.dtype)


sharded_product.defvjp(product_forward, product_backward)


def activation(axis: str | None) -> str | None:
    """The name of an axis of activations that a kernel with an axis of this name gives."""
    return None if axis == "embed" else axis


def look_up(table: jax.Array, ids: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    """Rows of a table (V, D) for ids (B, T), in `dtype`."""
    if layout.devices == 1:
        return jnp.take(table.astype(dtype), ids, axis=0)
    return sharded_look_up(table, ids, dtype, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sharded_look_up(table: jax.Array, ids: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    rows = jnp.take(layout.gather(table.astype(dtype), "vocab", "embed"), ids, axis=0)
    return layout.place(rows, "batch", None, None)


def look_up_forward(
    table: jax.Array, ids: jax.Array, dtype: Any, layout: Layout
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Keeps the table for its shape and type only."""
    return sharded_look_up(table, ids, dtype, layout), (table, ids)


def look_up_backward(
    dtype: Any, layout: Layout, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None]:
    """The sum of the gradients of the rows with the same id."""
    table, ids = kept
    zeros = layout.gather(jnp.zeros(table.shape, jnp.float32), "vocab", "embed")
    summed = zeros.at[ids].add(dy.astype(jnp.float32))
    return layout.place(summed, "vocab", "embed").astype(table.dtype), None


sharded_look_up.defvjp(look_up_forward, look_up_backward)


def logits(x: jax.Array, head: jax.Array, layout: Layout) -> jax.Array:
    """Hidden states (B, T, D) times the head (D, V), in float32."""
    return product(x, head, HEAD, layout).astype(jnp.float32)


def output_std(config: ModelConfig) -> float:
    """The initial deviation of the projections whose outputs are added to the residual stream.

    Scaled, the sum of all 2 n_layer of them begins with the same variance at each depth: GPT-2's.
    """
    return STD / math.sqrt(2 * config.n_layer) if is_depth_scaled(config) else STD


class Linear(nnx.Module):
    """A linear layer on a mesh; `axes` are the names of the axes of its kernel.

    The kernel begins normal with the deviation `std`, the bias at zero.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        axes: Axes,
        config: ModelConfig,
        layout: Layout,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        std: float = STD,
    ):
        self.dtype, self.axes, self.layout = jnp.dtype(config.compute_dtype), axes, layout
        param_dtype = jnp.dtype(config.param_dtype)
        init = nnx.initializers.normal(std)
        self.kernel = nnx.Param(init(rngs.params(), (d_in, d_out), param_dtype))
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (d_out,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The product with the kernel, and the bias if any: (B, T, in) to (B, T, out)."""
        x = x.astype(self.dtype)
        y = product(x, self.kernel[...], self.axes, self.layout)
        return y + self.bias[...].astype(self.dtype)[None, None] if self.use_bias else y


def norm(kind: type[Norm], config: ModelConfig, rngs: nnx.Rngs, epsilon: float = 0.0) -> Norm:
    """A norm over the width of the model, in float32 inside; `epsilon` replaces the setting."""
    return kind(
        config.d_model,
        epsilon=epsilon or config.norm_epsilon,
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Embed(nnx.Module):
    """An embedding on a mesh."""

    def __init__(self, size: int, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.dtype, self.layout = jnp.dtype(config.compute_dtype), layout
        shape = (size, config.d_model)
        init, param_dtype = nnx.initializers.normal(STD), jnp.dtype(config.param_dtype)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The rows of the table for ids (B, T)."""
        return look_up(self.embedding[...], ids, self.dtype, self.layout)
