"""Muon+ in Keras 3 on JAX: ``model.compile(optimizer=OptaxOptimizer(...))``.

``keras_optimizer.py`` beside this file is the one to copy.

A small transformer learns which token follows which, with ``model.fit``. A schedule, a callback or
``global_clipnorm`` of Keras works as with its own optimizers.

Install: ``pip install keras`` (tried: Keras 3.15.1, jax 0.10.2, Python 3.11). Keras reads
``KERAS_BACKEND`` when it is imported, so that this is set first.
Run: ``python -m examples.hosts.keras``.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import optax_muonplus as omp
from examples.hosts.keras_optimizer import OptaxOptimizer

VOCABULARY, WIDTH, LENGTH, HEADS = 64, 32, 16, 2


def transformer():
    """One block between an embedding and a head; what is named ``logits`` gets AdamW."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    y = layers.LayerNormalization(name="norm_1")(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="attention")
    x = x + attention(y, y, use_causal_mask=True)
    y = layers.LayerNormalization(name="norm_2")(x)
    x = x + layers.Dense(WIDTH, name="down")(layers.Dense(4 * WIDTH, "gelu", name="up")(y))
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x))


def batches(seed=0):
    """Texts in which each token has one successor."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(VOCABULARY, size=1024)]
    successor = rng.permutation(VOCABULARY)
    for _ in range(LENGTH):
        texts.append(successor[texts[-1]])
    texts = np.stack(texts, axis=1)
    return texts[:, :-1], texts[:, 1:]


def train(optimizer, epochs=3):
    """``model.fit``: the model, and the loss of each epoch."""
    keras.utils.set_random_seed(0)
    model = transformer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    inputs, targets = batches()
    history = model.fit(inputs, targets, batch_size=64, epochs=epochs, verbose=0)
    return model, history.history["loss"]


def muonplus(rate=0.02):
    """What a user adds."""
    return OptaxOptimizer(omp.muonplus, learning_rate=rate)


if __name__ == "__main__":
    model, losses = train(muonplus())
    print(omp.describe({v.path: v.value for v in model.trainable_variables}))
    print("Muon+ ", *(f"{loss:.3f}" for loss in losses))
    print("AdamW ", *(f"{loss:.3f}" for loss in train(keras.optimizers.AdamW(5e-3))[1]))
    print("Muon  ", *(f"{loss:.3f}" for loss in train(keras.optimizers.Muon(5e-3))[1]))
