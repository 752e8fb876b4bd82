"""Logits and losses of a trained model by whole passes over one row."""

import functools

import jax
import numpy as np


@functools.cache
def one_row(forward):
    """The logits of one row, compiled once for a model."""
    return jax.jit(lambda params, row: forward(params, row)[0])


def logits_after(model, ids):
    """The logits after each token; the row is padded behind."""
    row = np.zeros((1, model.config.model.context), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(one_row(model.forward)(model.params, row), np.float64)[: len(ids)]


def naive_losses(model, ids):
    """Nats of each token after the first."""
    logits = logits_after(model, ids[:-1])
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return total - logits[np.arange(len(ids) - 1), ids[1:]]
