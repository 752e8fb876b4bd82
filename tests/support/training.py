"""A small language-model task, and what a Muon+ training run must show."""

import jax
import numpy as np
import optax
import optax.contrib

import optax_muonplus as omp

VOCABULARY, LENGTH, WIDTH, HEADS = 11, 6, 8, 2
STEPS = 10
LEARNING_RATE = 0.02
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(4, LENGTH + 1))


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


def labels_by_path(params):
    """``{"block/kernel": "muon", ...}``"""
    with_path, _ = jax.tree.flatten_with_path(omp.partition_labels(params))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in with_path}


def assert_falls(losses):
    """By a third, from beginning to end."""
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.67 * losses[0], losses


def assert_matrix_moved_as_muon_plus_moves(old, new, output_axes, learning_rate=LEARNING_RATE):
    """After one step, by lr sqrt(m/n) for each unit row: an update that AdamW cannot make."""
    change = np.asarray(new, np.float64) - np.asarray(old, np.float64)
    reduction_axes = tuple(i for i in range(change.ndim) if i not in output_axes)
    n = np.prod([change.shape[i] for i in reduction_axes])
    m = np.prod([change.shape[i] for i in output_axes])
    rows = np.sqrt((change**2).sum(reduction_axes))
    # Two weights of size 1, rounded to 6e-8, differ by about 1e-2.
    np.testing.assert_allclose(rows, learning_rate * np.sqrt(m / n), rtol=1e-4)


# Every model below has these parts; the names are each library's own habit.
MATRICES_OF_ATTENTION = {"query", "key", "value", "out"}
