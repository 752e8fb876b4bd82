"""The GPT of the Muon+ paper, as its code has it (K1seki221/MuonPlus @8a9ace1).

Positions are learned, queries, keys and values come from one matrix, blocks have LayerNorms, and
the projections that are added to the residual stream begin smaller in deeper models: the sum of all
2 n_layer of them begins with one variance at each depth. Before the head is an RMSNorm, as in that
code, or with --model.final-norm layer a LayerNorm, as in GPT-2.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from examples.trainer.models import blocks, sharding
from examples.trainer.settings.run import ModelConfig, head_size, hidden_width

FINAL_EPSILON = 1e-6  # under the root of the RMSNorm, as in the paper's code


class Attention(nnx.Module):
    """Causal self-attention.

    The columns of `qkv` (D, 3 D) are ordered by head: K of its query, K of its key, K of its value,
    then the next head, as in Megatron-LM, so that a shard of them has whole heads. To the optimizer
    the kernel is one matrix of 3 D outputs, whose norms do not depend on their order.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, d = config, config.d_model
        init = nnx.initializers.normal(blocks.STD / (2 * config.n_layer) ** 0.5)
        self.qkv = blocks.linear(config, rngs)(d, 3 * d)
        self.out = blocks.linear(config, rngs, kernel_init=init)(d, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.config.n_head, 3, head_size(self.config))
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(shape), 3, 0)  # [B, T, H, K]
        return self.out(blocks.attend(q, k, v, self.config))


class MLP(nnx.Module):
    """Widens, applies GELU, and narrows again."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, f = config.d_model, hidden_width(config)
        init = nnx.initializers.normal(blocks.STD / (2 * config.n_layer) ** 0.5)
        self.up = blocks.linear(config, rngs)(d, f)
        self.down = blocks.linear(config, rngs, kernel_init=init)(f, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(sharding.place(jax.nn.gelu(self.up(x)), sharding.BATCH, None, "tensor"))


class Block(nnx.Module):
    """Attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.ln_1 = blocks.norm(nnx.LayerNorm, config, rngs)
        self.attn = Attention(config, rngs)
        self.ln_2 = blocks.norm(nnx.LayerNorm, config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(blocks.LanguageModel):
    """The whole network."""

    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        self.config = config
        self.wte = blocks.embedding(vocab_size, config, rngs)
        self.wpe = blocks.embedding(config.context, config, rngs)
        self.blocks = blocks.stack(lambda rngs: Block(config, rngs), config, rngs)
        if config.final_norm == "rms":
            self.ln_f = blocks.norm(nnx.RMSNorm, config, rngs, FINAL_EPSILON)
        else:
            self.ln_f = blocks.norm(nnx.LayerNorm, config, rngs)
        linear = blocks.linear(config, rngs, use_bias=False)
        self.lm_head = None if config.tied else linear(config.d_model, vocab_size)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))[None]
        x = blocks.run(self.blocks, self.config, x.astype(self.config.compute_dtype))
        return self.ln_f(x).astype(x.dtype)
