"""The MLP of a block: GELU as GPT has it, or SwiGLU as LLaMA."""

import jax
from flax import nnx

from examples.trainer.models.layers import Linear, output_std
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig, hidden_width, is_gated


class MLP(nnx.Module):
    """Widens, applies GELU or, for SwiGLU, multiplies by a gate, and narrows again."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        d, f, bias = config.d_model, hidden_width(config), config.family == "gpt"
        wider = d, f, ("embed", "mlp"), config, layout, rngs, bias
        self.is_gated = is_gated(config)
        if self.is_gated:
            self.gate = Linear(*wider)
        self.up = Linear(*wider)
        std = output_std(config)
        self.down = Linear(f, d, ("mlp", "embed"), config, layout, rngs, bias, std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x, [B, T, D]."""
        if self.is_gated:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return self.down(jax.nn.gelu(self.up(x)))
