"""Muon+ in tunix: by name in its configuration, or as the optimizer of ``PeftTrainer``.

tunix looks for ``opt_type`` among the names of Optax, where one line puts Muon+. Then its YAML, or
its command line, says ``optimizer_config: {opt_type: muonplus, learning_rate: 0.02}``. A tiny Qwen3
learns which token follows which.

Install: ``pip install google-tunix`` (tried: 0.1.7, Flax 0.12.8, jax 0.10.2, Python 3.11).
Run: ``python -m examples.hosts.tunix``.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import optax_muonplus as omp

VOCABULARY, LENGTH, ROWS = 64, 16, 32

optax.muonplus = omp.muonplus  # what a user adds


def qwen3():
    """Two layers, with a head of its own."""
    return Qwen3(
        ModelConfig(
            num_layers=2,
            vocab_size=VOCABULARY,
            embed_dim=32,
            hidden_dim=96,
            num_heads=4,
            head_dim=8,
            num_kv_heads=2,
            rope_theta=10_000,
            norm_eps=1e-6,
        ),
        rngs=nnx.Rngs(0),
    )


def batches(steps):
    """Texts in which each token has one successor, as tunix' default loss wants them."""
    rng = np.random.default_rng(0)
    successor = rng.permutation(VOCABULARY)
    for _ in range(steps):
        tokens = [rng.integers(VOCABULARY, size=ROWS)]
        for _ in range(LENGTH - 1):
            tokens.append(successor[tokens[-1]])
        yield {
            "input_tokens": jnp.asarray(np.stack(tokens, axis=1)),
            "input_mask": jnp.ones((ROWS, LENGTH), bool),
            "positions": jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
            "attention_mask": jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (ROWS, LENGTH, LENGTH)),
        }


def train(tx, model, steps=40):
    """The loop of tunix: the trainer, and the loss of each step."""
    trainer = PeftTrainer(model, tx, TrainingConfig(eval_every_n_steps=1000, max_steps=steps))
    trainer.train(batches(steps))
    return trainer, trainer.metrics_logger.get_metric_history("", "loss", "train")


def by_name(name, **settings):
    """As tunix' configuration makes an optimizer, whose learning rate it logs."""
    return optax.inject_hyperparams(getattr(optax, name))(**settings)


if __name__ == "__main__":
    print(omp.describe(nnx.state(qwen3(), nnx.Param)))
    for name, tx in [
        ("Muon+", by_name("muonplus", learning_rate=0.02)),
        ("AdamW", by_name("adamw", learning_rate=5e-3)),
        ("Muon", optax.contrib.muon(0.02)),
    ]:
        losses = train(tx, qwen3())[1]
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
