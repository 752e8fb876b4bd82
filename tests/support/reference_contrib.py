"""The optimizers that Muon+ is compared with, in NumPy float64, from their published code.

Each function takes ``w`` (out, in) before the step, its state and a gradient, and returns what is
added to ``w`` and the new state. The states are those of the published code: Mano's sum has no
factor (1 - beta). Like `reference`, this imports neither JAX nor the package.
"""

import numpy as np

from tests.support.reference import newton_schulz

# The last four of You Jiacheng's five rows of 2025 (x.com/YouJiacheng/status/1905861218138804534).
YOU_TURBO = [
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def normuon_step(
    w, state, g, *, learning_rate=1.0, beta=0.95, beta2=0.95, nu_eps=1e-10, rule="code",
    side="row", nesterov=True, weight_decay=0.0,
):  # fmt: skip
    """zichongli5/NorMuon @d45c9a4; ``rule="paper"`` is arXiv:2510.05491, algorithm 1.

    ``side="long_row"`` has the axis of nanochat @92d63d4, optim.py, and Emerging-Optimizers
    @fd77292, adaptive_muon.py; ``"long"`` is marin's, which has Muon for a square matrix.
    """
    m, v = state
    rows, columns = w.shape
    m = m + (1 - beta) * (g - m)
    o = newton_schulz(g + beta * (m - g) if nesterov else m)
    axis = 1 if side == "row" or rows >= columns else 0
    sizes = np.mean(np.abs(o) ** 2, axis=axis, keepdims=True)
    if side == "long" and rows == columns:
        sizes = np.mean(np.abs(o) ** 2, keepdims=True)
    v = (1 - beta2) * sizes + beta2 * v
    scaled = o / (np.sqrt(v) + nu_eps)
    if rule == "code":
        scaled *= np.linalg.norm(o) / (np.linalg.norm(scaled) + nu_eps)
        scaled *= max(1, rows / columns) ** 0.5
    else:
        scaled *= 0.2 * np.sqrt(rows * columns) / np.linalg.norm(scaled)
    return -learning_rate * (scaled + weight_decay * w), (m, v)


def adamuon_step(
    w, state, g, *, learning_rate=1.0, beta=0.95, beta2=None, nu_eps=1e-8, sign=True,
    nesterov=True, weight_decay=0.0,
):  # fmt: skip
    """Chongjie-Si/AdaMuon @369f0b3."""
    m, v = state
    beta2 = beta if beta2 is None else beta2
    m = m + (1 - beta) * (g - m)
    u = g + beta * (m - g) if nesterov else m
    o = newton_schulz(np.sign(u) if sign else u)
    v = beta2 * v + (1 - beta2) * o * o
    scaled = o / (np.sqrt(v) + nu_eps)
    scaled *= 0.2 * np.sqrt(w.size) / (np.linalg.norm(scaled) + nu_eps)
    return -learning_rate * (scaled + weight_decay * w), (m, v)


def hyperball_step(w, m, g, *, learning_rate=1.0, beta=0.95, nesterov=True):
    """MuonH: KellerJordan/modded-nanogpt @f411b3d, train_gpt_simple_muonh.py."""
    m = m + (1 - beta) * (g - m)
    u = newton_schulz(g + beta * (m - g) if nesterov else m)
    radius = np.linalg.norm(w)
    v = w - learning_rate * radius * u / max(np.linalg.norm(u), 1e-10)
    return v * radius / np.linalg.norm(v) - w, m


def adamh_step(w, state, g, *, learning_rate=1.0, b1=0.9, b2=0.95, eps=1e-8):
    """marin-community/marin @0084342, adamh.py; the state is None before the first step."""
    m, v, t = state or (0.0, 0.0, 0)
    m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, t + 1
    u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
    radius = np.linalg.norm(w)
    after = w - learning_rate * radius * u / np.linalg.norm(u)
    return after * radius / np.linalg.norm(after) - w, (m, v, t)


def mano_step(
    w, state, g, *, learning_rate=1.0, beta=0.95, eps=1e-8, nesterov=False, weight_decay=0.0
):
    """xie-lab-ml/Mano-Restriking-Manifold-Optimization-for-LLM-Training @b78b952, mano.py."""
    total, count = state
    k = count % 2
    total = beta * total + g
    d = g + beta * total if nesterov else total
    unit = w / np.maximum(np.linalg.norm(w, axis=k, keepdims=True), eps)
    t = d - np.sum(d * unit, axis=k, keepdims=True) * unit
    u = t / np.maximum(np.linalg.norm(t, axis=k, keepdims=True), eps)
    update = 0.2 * np.sqrt(w.shape[k]) * u
    return -learning_rate * (update + weight_decay * w), (total, count + 1)


def turbo_muon_step(w, m, g, *, learning_rate=1.0, beta=0.95, nesterov=True, weight_decay=0.0):
    """thib-s/flash-newton-schulz @145260f: the side with fewer units is scaled, rows if equal."""
    m = m + (1 - beta) * (g - m)
    x = g + beta * (m - g) if nesterov else m
    rows, columns = w.shape
    x = x.T if rows > columns else x
    gram = np.abs(x @ x.T)
    x = x / np.sqrt(np.maximum(gram.sum(axis=1, keepdims=True), 1e-30))
    for a, b, c in YOU_TURBO:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if rows > columns else x
    return -learning_rate * (max(1, rows / columns) ** 0.5 * x + weight_decay * w), m


def aurora_step(
    w, m, g, *, learning_rate=1.0, beta=0.95, nesterov=True, ns_coeffs=(2, -1.5, 0.5),
    ns_steps=12, rounds=2, damping=0.5, norm_eps=1e-7, weight_decay=0.0,
):  # fmt: skip
    """tilde-research/aurora-release @3d79a5c, src/aurora.py and src/polar.py."""
    m = m + (1 - beta) * (g - m)
    x = g + beta * (m - g) if nesterov else m
    rows, columns = w.shape
    wide = rows < columns
    x = x.T if wide else x
    if rows == columns:
        u = newton_schulz(x, ns_coeffs, ns_steps)
    else:
        d = 1 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), norm_eps)
        for k in range(rounds):
            u = newton_schulz(d * x, ns_coeffs, ns_steps)
            if k < rounds - 1:
                squares = np.maximum(np.sum(u**2, axis=1, keepdims=True), norm_eps**2)
                d = d * (min(w.shape) / max(w.shape) / squares) ** damping
    u = u.T if wide else u
    return -learning_rate * (max(1, rows / columns) ** 0.5 * u + weight_decay * w), m


def muoneq_step(
    w, total, g, *, learning_rate=1.0, beta=0.95, nesterov=True, sides="row", norm_eps=2.5e-11,
    weight_decay=0.0,
):  # fmt: skip
    """MaeChd/muon-eq @99b6c8b, muoneq.py: its momentum is a sum, so that its eps is larger."""
    total = beta * total + g
    x = g + beta * total if nesterov else total
    eps = norm_eps / (1 - beta) ** 2
    row = 1 / np.sqrt(np.sum(x**2, axis=1, keepdims=True) + eps)
    column = 1 / np.sqrt(np.sum(x**2, axis=0, keepdims=True) + eps)
    x = x * (1 if sides == "col" else row) * (1 if sides == "row" else column)
    update = 0.2 * max(w.shape) ** 0.5 * newton_schulz(x)
    return -learning_rate * (update + weight_decay * w), total
