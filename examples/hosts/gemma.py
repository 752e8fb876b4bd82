"""Muon+ in Flax' own example gemma, an NNX transformer: one name changed in its ``train.py``.

There ``optax.adamw(learning_rate_fn, b1=0.9, b2=0.98, eps=1e-9, weight_decay=...)`` becomes what
``muonplus`` below returns. Here a tiny Gemma and gemma's own step learn which token follows which.

Install: a checkout of github.com/google/flax, its folder ``examples/gemma`` on ``PYTHONPATH``, and
``pip install flax clu grain jaxtyping sentencepiece tensorflow-cpu tensorflow-datasets
tensorboard`` (tried: commit 18f8f31, Flax 0.12.8, jax 0.10.2, Python 3.11).
Run: ``python -m examples.hosts.gemma``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train as gemma  # examples/gemma/train.py of Flax
from flax import nnx
from transformer import Transformer, TransformerConfig

import optax_muonplus as omp

VOCABULARY = 64


def muonplus(schedule, weight_decay=0.1):
    """What a user puts in the place of ``optax.adamw``; the other group keeps its settings."""
    return omp.muonplus(
        lambda step: 10 * schedule(step),
        adam_learning_rate=schedule,
        adam_b2=0.98,
        adam_eps=1e-9,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
    )


def transformer():
    """The configuration tiny.py, made smaller."""
    config = TransformerConfig.from_dict(
        num_layers=2,
        num_embed=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(1, 1),
        final_logit_softcap=None,
        dtype=jnp.float32,
    )
    return Transformer(config, rngs=nnx.Rngs(params=0, dropout=0))


def batches(steps, rows=32, length=16):
    """Texts in which each token has one successor; token 0 is padding."""
    rng = np.random.default_rng(0)
    successor = 1 + rng.permutation(VOCABULARY - 1)
    for _ in range(steps):
        tokens = [1 + rng.integers(VOCABULARY - 1, size=rows)]
        for _ in range(length):
            tokens.append(successor[tokens[-1] - 1])
        text = np.stack(tokens, axis=1)
        positions = np.broadcast_to(np.arange(length), (rows, length))
        yield {"inputs": text[:, :-1], "targets": text[:, 1:], "inputs_position": positions}


def train(tx, steps=40):
    """The step of gemma: the optimizer, and the loss of each step."""
    model, rngs = transformer(), nnx.Rngs(0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(gemma.nnx_train_step)
    losses = []
    for batch in batches(steps):
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        step(model, optimizer, rngs, jax.tree.map(jnp.asarray, batch), metrics)
        losses.append(float(metrics.compute()["loss"]))
    return optimizer, losses


if __name__ == "__main__":
    print(omp.describe(nnx.state(transformer(), nnx.Param)))
    schedule = gemma.create_learning_rate_schedule(3e-3, 5)
    for name, tx in [
        ("Muon+", muonplus(schedule)),
        ("AdamW", optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)),
        ("Muon", optax.contrib.muon(lambda s: 10 * schedule(s), adam_learning_rate=schedule)),
    ]:
        losses = train(tx)[1]
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
