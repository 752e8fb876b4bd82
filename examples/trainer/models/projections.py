"""The projections of attention: to queries, keys and values, and back from heads."""

import jax
from flax import nnx

from examples.trainer.models.layers import Linear, output_std
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig, head_size, is_fused


class Projections(nnx.Module):
    """The four projections, of which the first three may be one matrix.

    The columns of the fused kernel (D, 3 D) are ordered by head: K of its query, K of its key, K of
    its value, then the next head, as in Megatron-LM. So each shard of the columns has whole heads,
    and no device needs the columns of another. To the optimizer the kernel is one matrix of 3 D
    outputs; its norms of rows and columns do not depend on the order of the outputs.
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, use_bias: bool):
        d, given = config.d_model, (config, layout, rngs, use_bias)
        self.config, self.fused = config, is_fused(config)
        if self.fused:
            self.qkv = Linear(d, 3 * d, ("embed", "heads"), *given)
        else:
            self.query = Linear(d, d, ("embed", "heads"), *given)
            self.key = Linear(d, d, ("embed", "heads"), *given)
            self.value = Linear(d, d, ("embed", "heads"), *given)
        self.out = Linear(d, d, ("heads", "embed"), *given, output_std(config))

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of `x` (B, T, D), each (B, T, H, K)."""
        shape = (*x.shape[:2], self.config.n_head, head_size(self.config))
        if not self.fused:
            q, k, v = self.query(x), self.key(x), self.value(x)
            return q.reshape(shape), k.reshape(shape), v.reshape(shape)
        fused = self.qkv(x).reshape(*shape[:3], 3, shape[3])  # [B, T, H, 3, K]
        return fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
