"""Attention logits, and QK-clip of single heads, in float64 NumPy: loops over heads, no JAX."""

import numpy as np


def logits(queries, keys):
    """Scores (heads, T, T) of causal attention; later keys have -inf.

    Queries are (T, heads, size), keys (T, shared heads, size).
    """
    t, heads, size = queries.shape
    group = heads // keys.shape[1]
    scores = np.full((heads, t, t), -np.inf)
    for h in range(heads):
        for i in range(t):
            for j in range(i + 1):
                scores[h, i, j] = queries[i, h] @ keys[j, h // group] / np.sqrt(size)
    return scores


def clipped(queries, keys, maxima, threshold):
    """Rows of queries (heads, size, ...) and keys (shared heads, size, ...) after the clip."""
    queries, keys = (np.array(x, np.float64) for x in (queries, keys))
    group = len(queries) // len(keys)
    smallest = np.ones(len(keys))
    for h, largest in enumerate(maxima):
        if largest > threshold:
            factor = np.sqrt(threshold / np.float64(largest))
            queries[h] *= factor
            smallest[h // group] = min(smallest[h // group], factor)
    for g, factor in enumerate(smallest):
        keys[g] *= factor
    return queries, keys
