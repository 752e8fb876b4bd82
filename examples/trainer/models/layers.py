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

from examples.trainer.settings.model import ModelConfig

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
        """`function` of arrays to one of their shape, by each device for its own shards."""
        if self.mesh is None or self.devices == 1:
            return function(*arrays)
        one = spec(axes, arrays[0].shape, self.mesh)
        # Kernels do not say along which mesh axes their results differ, so that is not checked.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=one, out_specs=one, check_vma=False
        )(*arrays)


ONE_DEVICE = Layout()


# GPT-2's, the paper's GPT's, and the initializer_range of the LLaMA in Hugging Face transformers.
STD = 0.02
NORM_EPSILON = 1e-5  # added to the variance under the root, in all norms but GPT's RMSNorm
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
    """Rows of a table (V, D) for ids (B, T), in `dtype`; gradients are sums in the table's."""
    rows = jnp.take(layout.gather(table, "vocab", "embed"), ids, axis=0)
    return layout.place(rows.astype(dtype), "batch", None, None)


def logits(x: jax.Array, head: jax.Array, layout: Layout) -> jax.Array:
    """Hidden states (B, T, D) times the head (D, V), in float32."""
    return product(x, head, HEAD, layout).astype(jnp.float32)


def output_std(config: ModelConfig) -> float:
    """The initial deviation of the projections whose outputs are added to the residual stream.

    Under GPT the sum of all 2 n_layer of them begins with the same variance at each depth.
    """
    return STD / math.sqrt(2 * config.n_layer) if config.family == "gpt" else STD


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


def norm(
    kind: type[Norm], config: ModelConfig, rngs: nnx.Rngs, epsilon: float = NORM_EPSILON
) -> Norm:
    """A norm over the width of the model, in float32 inside."""
    return kind(
        config.d_model,
        epsilon=epsilon,
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
