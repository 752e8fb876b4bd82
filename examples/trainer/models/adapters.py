"""LoRA: adapters of linear layers, added to a model and merged into its kernels.

A layer with the kernel W (in, out) gets A (in, r) and B (r, out), and computes
x W + (alpha / r) x A B. A begins uniform within 1 / sqrt(in), as in PEFT, and B at zero, so that
the model begins as it was. Source: Hu et al., LoRA (arXiv:2106.09685), section 4.1.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.trainer.models.layers import Linear
from examples.trainer.settings.model import LoRAConfig, ModelConfig
from examples.trainer.system.patterns import search

A, B = "lora_a", "lora_b"


def add(model: nnx.Module, config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Gives adapters to the layers of blocks that the settings name; raises if there is none."""
    lora = config.lora
    layers = {
        "/".join(map(str, path)): part
        for path, part in nnx.iter_graph(model)
        if isinstance(part, Linear) and "blocks" in path  # the head is read as a matrix
    }
    for name in search(lora.targets, list(layers), "--lora.targets", "layer"):
        layer, dtype = layers[name], jnp.dtype(config.param_dtype)
        *stack, d_in, d_out = layer.kernel.shape
        limit = 1 / math.sqrt(d_in)
        shape = (*stack, d_in, lora.rank)
        a = jax.random.uniform(rngs.params(), shape, jnp.float32, -limit, limit)
        layer.lora_a = nnx.Param(a.astype(dtype))
        layer.lora_b = nnx.Param(jnp.zeros((*stack, lora.rank, d_out), dtype))
        layer.lora_scale = lora.alpha / lora.rank


def merged(params: Any, lora: LoRAConfig) -> optax.Params:
    """The parameters without adapters, which are in the kernels W + (alpha / r) A B then."""
    if not isinstance(params, dict):
        return params
    rest: dict[Any, Any] = {
        name: merged(part, lora) for name, part in params.items() if name not in (A, B)
    }
    if A in params:
        kernel = rest["kernel"]
        a, b = (params[name].astype(jnp.float32) for name in (A, B))
        product = jnp.matmul(a, b, precision="highest") * (lora.alpha / lora.rank)
        rest["kernel"] = (kernel.astype(jnp.float32) + product).astype(kernel.dtype)
    return rest
