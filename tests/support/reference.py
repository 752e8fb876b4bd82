"""Muon+ in NumPy float64, transcribed from the paper: the oracle of the test suite.

It imports neither JAX nor the package, so that an error shared with the package would have to be
made twice.

One matrix ``W`` acts as ``y = W x`` and has shape ``(m, n) = (out, in)``, as in the paper. Every
function takes one matrix, real or complex; nothing is batched, grouped or fused.
"""

import numpy as np

from tests.support.reference_coefficients import SAFETY, coefficient_rows

# --- polar factor -------------------------------------------------------------------------------


def pre_normalize(x, preconditioning, eps, safety=1.0):
    """Bring the singular values of ``x`` to at most ``1 / safety``."""
    if preconditioning == "frobenius":
        size = np.sqrt(np.sum(np.abs(x) ** 2))
    elif preconditioning == "spectral":
        size = np.linalg.svd(x, compute_uv=False)[0]
    elif preconditioning == "schatten":  # (sum of s^4)^(1/4), from the Gram matrix
        size = np.sum(np.linalg.svd(x, compute_uv=False) ** 4) ** 0.25
    elif preconditioning == "aol":  # one number for each unit of the shorter side
        m, n = x.shape
        if n <= m:
            size = np.sqrt(np.abs(x.conj().T @ x).sum(axis=0))[None, :]
        else:
            size = np.sqrt(np.abs(x @ x.conj().T).sum(axis=1))[:, None]
    else:
        raise ValueError(preconditioning)
    size = safety * size + eps
    return np.divide(x, size, out=np.zeros_like(x), where=size > 0)


def newton_schulz(x, table="jordan", steps=5, preconditioning="frobenius", eps=1e-30):
    """The Newton-Schulz iteration, in the order in which the papers write it."""
    safety = SAFETY.get(table, 1.0) if isinstance(table, str) else 1.0
    x = pre_normalize(x, preconditioning, eps, safety=safety)
    for a, b, c in coefficient_rows(table, steps):
        gram = x @ x.conj().T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def svd_polar(x):
    """``U V^H`` over the singular values that are not zero; a partial isometry if some are."""
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    kept = s > s[0] * max(x.shape) * np.finfo(np.float32).eps if s[0] > 0 else s > 0
    return (u * kept) @ vh


def polar_factor(x, table="jordan", steps=5, preconditioning="frobenius", eps=1e-30):
    """``Ortho`` of the paper; the table "svd" is the exact factor."""
    if isinstance(table, str) and table == "svd":
        return svd_polar(x)
    return newton_schulz(x, table, steps, preconditioning, eps)


# --- normalization (paper, algorithm 1, norm_dir) -----------------------------------------------


def norm_dir(x, d, eps=1e-8):
    if d == "none":
        return x
    if d == "col":
        return x / np.sqrt(np.sum(np.abs(x) ** 2, axis=-2, keepdims=True) + eps)
    if d == "row":
        return x / np.sqrt(np.sum(np.abs(x) ** 2, axis=-1, keepdims=True) + eps)
    if d == "col_row":
        return norm_dir(norm_dir(x, "col", eps), "row", eps)
    if d == "row_col":
        return norm_dir(norm_dir(x, "row", eps), "col", eps)
    return norm_dir(x, long_side(*x.shape), eps)


def long_side(m, n):
    """The longer side of a matrix (m, n)."""
    return "none" if m == n else "row" if m > n else "col"


# --- factors of the shape -----------------------------------------------------------------------


def shape_factor(m, n, shape_scale="max"):
    return {
        "spectral": np.sqrt(m / n),
        "max": np.sqrt(max(1.0, m / n)),
        "none": 1.0,
    }[shape_scale]


def rms_factor(m, n, rms, norm="none", match_frobenius=False):
    """What an ideal update is multiplied by for the root of its mean square to be ``rms``."""
    if norm == "long":
        norm = long_side(m, n)
    if norm == "none" or match_frobenius:  # min(m, n) singular values of one
        squares = min(m, n)
    elif norm.endswith("row"):  # m rows of length one
        squares = m
    else:  # n columns of length one
        squares = n
    return rms / np.sqrt(squares / (m * n))


# --- one step -----------------------------------------------------------------------------------


def momentum(m_prev, g, t, beta=0.95, nesterov=True, bias_correction=False):
    """``(what the polar factor is taken of, the new buffer)`` at step ``t = 1, 2, ...``"""
    m = beta * m_prev + (1 - beta) * g
    if bias_correction and nesterov:  # NAdam, as optax.contrib.muon has it
        m_hat, g_hat = m / (1 - beta ** (t + 1)), g / (1 - beta**t)
        return beta * m_hat + (1 - beta) * g_hat, m
    if bias_correction:
        return m / (1 - beta**t), m
    if nesterov:
        return beta * m + (1 - beta) * g, m
    return m, m


def muonplus_step(
    w, m_prev, g, t, *, learning_rate=1.0, beta=0.95, nesterov=True, bias_correction=False,
    table="jordan", steps=5, preconditioning="frobenius", eps=1e-30, norm="row_col", norm_eps=1e-8,
    match_frobenius=True, adaptive=False, shape_scale="max", consistent_rms=None,
    weight_decay=0.0, cautious_weight_decay=False,
):  # fmt: skip
    """Paper, algorithm 1, with every option: ``(what is added to w, the new momentum buffer)``.

    Nesterov is on, as in the paper's published code; its algorithm has none.
    """
    # momentum
    direction, m_new = momentum(m_prev, g, t, beta, nesterov, bias_correction)
    # orthogonalize
    u = polar_factor(direction, table, steps, preconditioning, eps)
    # normalize
    o = norm_dir(u, norm, norm_eps)
    # A root mean square that is asked for replaces the norm that u had.
    match_frobenius &= consistent_rms is None or adaptive
    if match_frobenius and np.any(o):
        o = o * np.linalg.norm(u) / np.linalg.norm(o)
    # scale
    if adaptive:
        o = o * np.sum(direction.conj() * o).real
    rows, columns = w.shape
    if consistent_rms is None:
        o = o * shape_factor(rows, columns, shape_scale)
    else:
        o = o * rms_factor(rows, columns, consistent_rms, norm, match_frobenius)
    # update
    decaying = (o * w.conj()).real >= 0 if cautious_weight_decay else 1.0  # arXiv:2510.12402
    return -learning_rate * (o + weight_decay * decaying * w), m_new


def adamw_step(
    w, m_prev, v_prev, g, t, *, learning_rate=1.0, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0,
    weight_decay=0.0, nesterov=True,
):  # fmt: skip
    """AdamW, for the leaves that are no matrices: ``(what is added to w, m, v)``."""
    m_hat, m = momentum(m_prev, g, t, b1, nesterov, bias_correction=True)
    v = b2 * v_prev + (1 - b2) * np.abs(g) ** 2
    v_hat = v / (1 - b2**t)
    return -learning_rate * (m_hat / (np.sqrt(v_hat + eps_root) + eps) + weight_decay * w), m, v
