"""Measures of imbalance in float64 NumPy, each of one matrix (out, in)."""

import jax.numpy as jnp
import numpy as np
import scipy.stats

SIDES = ("row", "col")


def gaussian(*shape, seed=0, dtype=np.float32):
    x = np.random.default_rng(seed).normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    return jnp.asarray(x, dtype)


def squares(x, side):
    x = np.asarray(x)
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    return (np.abs(wide) ** 2).sum(axis=1 if side == "row" else 0)


def variance(x, side):
    s = squares(x, side)
    return np.mean((s - np.sum(s) / len(s)) ** 2)


def ratio(x, side):
    s = np.sqrt(squares(x, side))
    return s.max() / s.min()


def correlation(x, y, side):
    return scipy.stats.spearmanr(squares(x, side), squares(y, side)).statistic
