"""Muon+ with Flax Linen: ``TrainState.create(..., tx=omp.muonplus(...))``.

A one-block transformer learns to repeat the token before the current one. Attention kernels of
three axes, (width, heads, head size), are matrices too. The last layer is named ``head`` and so
gets AdamW; as ``Dense_2``, its automatic name, it would get Muon+: nothing is guessed.

Run: ``python examples/flax_linen.py`` or ``python -m examples.flax_linen``.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import optax_muonplus as omp

VOCABULARY, LENGTH, WIDTH = 16, 12, 32


class Model(nn.Module):
    """A transformer of one block."""

    @nn.compact
    def __call__(self, tokens):
        """Logits (batch, length, vocabulary)."""
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + self.param("pos_embed", nn.initializers.normal(0.2), (LENGTH, WIDTH))[None]
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY, name="head")(x)


@jax.jit
def train_step(state, tokens):
    """One step of training: the new state, and the loss before it."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens)[:, 1:]
        targets = tokens[:, :-1]  # at place t the token at t - 1
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Model()
rng = np.random.default_rng(0)
tokens = rng.integers(VOCABULARY, size=(64, LENGTH))
params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
print(omp.describe(params))

tx = omp.muonplus(0.02)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
for i in range(61):
    tokens = rng.integers(VOCABULARY, size=(64, LENGTH))
    state, loss = train_step(state, tokens)
    if i % 10 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
