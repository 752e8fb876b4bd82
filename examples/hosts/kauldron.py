"""Muon+ in kauldron: ``optimizer=omp.muonplus(...)`` in the configuration.

A tiny transformer of Flax Linen learns which token follows which, in kauldron's own trainer.

Install: ``pip install kauldron`` (tried: 1.4.4, Flax 0.12.12, jax 0.12.0.1, Python 3.12).
Run: ``python -m examples.hosts.kauldron``. In a configuration file: import optax_muonplus within
``with konfig.imports():``, and say ``cfg.optimizer = omp.muonplus(learning_rate=0.02)``.
"""

import dataclasses
import tempfile

import flax.linen as nn
import numpy as np
import optax
from kauldron import kd
from kauldron.typing import Float, Int

import optax_muonplus as omp

VOCABULARY, WIDTH, LENGTH, ROWS = 64, 32, 16, 2048


class Model(nn.Module):
    """One block between an embedding and a head."""

    tokens: kd.kontext.Key = "batch.tokens"

    @nn.compact
    def __call__(self, tokens: Int["*b n 1"]) -> Float["*b n v"]:
        """Logits of the next tokens."""
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens[..., 0])
        mask = nn.make_causal_mask(tokens[..., 0])
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.LayerNorm()(x), mask=mask)
        up = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        x = x + nn.Dense(WIDTH, name="down")(up)
        return nn.Dense(VOCABULARY, name="head")(x)


def texts():
    """Texts in which each token has one successor."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(VOCABULARY, size=ROWS)]
    successor = rng.permutation(VOCABULARY)
    for _ in range(LENGTH):
        tokens.append(successor[tokens[-1]])
    tokens = np.stack(tokens, axis=1)[..., None]
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class Losses(kd.train.metric_writer.NoopWriter):
    """Keeps the losses, in place of files for TensorBoard."""

    losses: list = dataclasses.field(default_factory=list)

    def write_step_metrics(self, *, aux, **rest):
        """Called every ``log_metrics_every`` steps."""
        self.losses.append(float(aux.compute(flatten=False).loss_values["xent"]))


def trainer(optimizer, steps=40):
    """A configuration of kauldron; ``optimizer`` is the line that a user changes."""
    return kd.train.Trainer(
        seed=0,
        workdir=tempfile.mkdtemp(),
        train_ds=kd.data.InMemoryPipeline(
            loader=texts, batch_size=32, shuffle=True, num_epochs=None
        ),
        model=Model(),
        train_losses={
            "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                logits="preds", labels="batch.targets"
            )
        },
        optimizer=optimizer,
        num_train_steps=steps,
        log_metrics_every=1,
        writer=Losses(),
    )


def train(optimizer, steps=40):
    """The loop of kauldron: the state, and the loss of each step."""
    run = trainer(optimizer, steps)
    state, _ = run.train()
    return state, run.writer.losses


if __name__ == "__main__":
    for name, tx in [
        ("Muon+", omp.muonplus(0.02, adam_learning_rate=5e-3)),
        ("AdamW", optax.adamw(5e-3)),
        ("Muon", optax.contrib.muon(0.02, adam_learning_rate=5e-3)),
    ]:
        state, losses = train(tx)
        if name == "Muon+":
            print(omp.describe(state.params))
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
