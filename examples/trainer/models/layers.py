"""Linear layers and embeddings whose parameters are shards: FSDP.

A kernel is gathered in the dtype of the activations just before a product, and again in the
backward pass, so that a device holds one whole layer at a time. Gradients are summed in float32,
within a device and between devices, and only the shard of the sum is kept.
"""

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models.layout import Axes, Layout
from examples.trainer.settings.model import ModelConfig, is_depth_scaled

# GPT-2's, the paper's GPT's, and the initializer_range of the LLaMA in Hugging Face transformers.
STD = 0.02
HEAD = ("embed", "vocab")
"""The names of the axes of the matrix from hidden states to logits."""

Norm = TypeVar("Norm", nnx.LayerNorm, nnx.RMSNorm)


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
    of_x, of_y = (("batch", None, activation(axis)) for axis in axes)
    dk = layout.sum_of_rows(kernel_gradient, axes, (x, of_x), (dy, of_y))
    return layout.place(dx, *of_x), dk.astype(kernel.dtype)


def kernel_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)


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

    if layout.rounds_sums(len(ids)):
        of_rows = ("batch", None)
        summed = layout.sum_of_rows(
            lambda ids, dy: row_gradients(jnp.zeros(table.shape, jnp.float32), ids, dy),
            (None, "embed"),
            (ids, of_rows),
            (dy, (*of_rows, None)),
        )
    else:
        zeros = layout.gather(jnp.zeros(table.shape, jnp.float32), "vocab", "embed")
        summed = row_gradients(zeros, ids, dy)
    return layout.place(summed, "vocab", "embed").astype(table.dtype), None


def row_gradients(zeros: jax.Array, ids: jax.Array, dy: jax.Array) -> jax.Array:
    return zeros.at[ids].add(dy.astype(jnp.float32))


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

    The kernel begins normal with the deviation `std`, the bias at zero. `adapters.add` may give it
    an adapter.
    """

    lora_a: nnx.Param | None = None
    lora_b: nnx.Param | None = None
    lora_scale = 0.0

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
        """The product with the kernel, and bias and adapter if any: (B, T, in) to (B, T, out)."""
        x = x.astype(self.dtype)
        y = product(x, self.kernel[...], self.axes, self.layout)
        if self.lora_a is not None and self.lora_b is not None:
            low = product(x, self.lora_a[...], (self.axes[0], None), self.layout)
            change = product(low, self.lora_b[...], (None, self.axes[1]), self.layout)
            y = y + self.lora_scale * change
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
