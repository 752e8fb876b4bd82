"""Muon+ with Flax NNX: ``nnx.Optimizer(model, tx, wrt=nnx.Param)``.

A small residual network learns which token follows which. Its kernels get Muon+; the embedding, the
norm, the biases and the layer named ``head`` get AdamW.

Run: ``python examples/flax_nnx.py`` or ``python -m examples.flax_nnx``.
"""

import numpy as np
import optax
from flax import nnx

import optax_muonplus as omp

VOCABULARY, WIDTH = 64, 32


class Model(nnx.Module):
    """A residual network on embedded tokens."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        """Logits of the next tokens."""
        x = self.embed(tokens)
        x = x + self.down(nnx.gelu(self.up(self.norm(x))))
        return self.head(x)


def loss_fn(model, tokens, targets):
    """Mean cross entropy."""
    logits = model(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@nnx.jit
def train_step(model, optimizer, tokens, targets):
    """Changes model and optimizer in place; returns the loss before that."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens, targets)
    optimizer.update(model, grads)
    return loss


model = Model(nnx.Rngs(0))
print(omp.describe(nnx.to_pure_dict(nnx.state(model, nnx.Param))))

tx = omp.muonplus(0.02)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

# Each token has one successor: its image under a random permutation.
rng = np.random.default_rng(0)
successor = rng.permutation(VOCABULARY)
for i in range(61):
    tokens = rng.integers(VOCABULARY, size=256)
    loss = train_step(model, optimizer, tokens, successor[tokens])
    if i % 10 == 0:
        print(f"step {i:3d}  loss {loss:.4f}")
