"""Muon+ in NumPy float64, transcribed from the paper: the oracle of the test suite.

It imports neither JAX nor the package, and its coefficient tables were typed from the publications,
so that an error shared with the package would have to be made twice.

One matrix ``W`` acts as ``y = W x`` and has shape ``(m, n) = (out, in)``, as in the paper. Every
function takes one matrix, real or complex; nothing is batched, grouped or fused.
"""

import functools

import numpy as np
from scipy.optimize import linprog

# --- coefficients: rows (a, b, c) of  X <- a X + b (X X^H) X + c (X X^H)^2 X --------------------

# Jordan et al. 2024 (kellerjordan.github.io/posts/muon); paper, appendix D.1: one row, repeated.
JORDAN = [(3.4445, -4.7750, 2.0315)]

# You Jiacheng; paper, appendix D.2: six rows, of which Muon+ uses the first five.
YOU = [
    (3955 / 1024, -8306 / 1024, 5008 / 1024),
    (3735 / 1024, -6681 / 1024, 3463 / 1024),
    (3799 / 1024, -6499 / 1024, 3211 / 1024),
    (4019 / 1024, -6385 / 1024, 2906 / 1024),
    (2677 / 1024, -3029 / 1024, 1162 / 1024),
    (2172 / 1024, -1833 / 1024, 682 / 1024),
]

# Amsel et al. 2025, arXiv 2505.16932, listing 1; paper, appendix D.3: before the safety factor.
POLAR_EXPRESS_AS_PRINTED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
# The same listing divides every row but the last one by 1.01, 1.01^3 and 1.01^5, and normalizes the
# matrix to norm 1/1.01.
POLAR_EXPRESS = [
    (a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS_AS_PRINTED[:-1]
] + POLAR_EXPRESS_AS_PRINTED[-1:]

# You Jiacheng's five rows used by Dion (microsoft/dion) and by optax.contrib.muon as "dion".
DION = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]

# Boissin et al. 2025, arXiv 2512.04632 (Turbo-Muon): the last four rows above.
TURBO = [
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]

# Grishina et al. 2025, arXiv 2506.10935 (CANS), as printed in NVIDIA Emerging-Optimizers. Later
# rows continue the recursion that made these, see `cans`.
CANS = [
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
]

TABLES = {
    "jordan": JORDAN,
    "you": YOU,
    "polar_express": POLAR_EXPRESS,
    "dion": DION,
    "turbo": TURBO,
}


def coefficient_rows(table, steps):
    """The ``steps`` rows that an iteration uses; ``table`` is a name, one triple or rows."""
    if table == "cans":
        return cans(steps)
    rows = TABLES[table] if isinstance(table, str) else table
    if np.ndim(rows) == 1:
        rows = [rows]
    if len(rows) == 1 or table == "polar_express":  # these repeat their last row
        rows = list(rows) + [rows[-1]] * steps
    assert len(rows) >= steps, f"{table!r} has {len(rows)} rows, {steps} were asked for"
    return rows[:steps]


def cans(steps):
    """The printed rows, then the closest to 1 on what the row before leaves, then its limit."""
    if steps <= len(CANS):
        return CANS[:steps]
    low = 1e-3
    for a, b, c in CANS:  # each row sends [low, 2 - low] to an interval of the same form
        low = a * low + b * low**3 + c * low**5
    limit = (15 / 8, -10 / 8, 3 / 8)  # of the closest quintic on [1 - e, 1 + e], for e -> 0
    return [*CANS, closest_to_one(low, 2 - low)] + [limit] * (steps - len(CANS) - 1)


@functools.cache
def closest_to_one(low, high):
    """``(a, b, c)`` for which ``a x + b x^3 + c x^5`` is closest to 1 on ``[low, high]``.

    A linear program on a grid, least E with -E <= p(x) - 1 <= E: no exchange algorithm is involved.
    """
    x = np.geomspace(low, high, 4000)[:, None]
    powers, one = np.hstack([x, x**3, x**5]), np.ones_like(x)
    program = linprog(
        c=[0, 0, 0, 1],
        A_ub=np.block([[powers, -one], [-powers, -one]]),
        b_ub=np.concatenate([one, -one]).ravel(),
        bounds=[(None, None)] * 3 + [(0, None)],
    )
    return tuple(program.x[:3])


# --- polar factor -------------------------------------------------------------------------------


def pre_normalize(x, preconditioning, eps, safety=1.0):
    """Bring the singular values of ``x`` to at most ``1 / safety``."""
    if preconditioning == "frobenius":
        size = np.sqrt(np.sum(np.abs(x) ** 2))
    elif preconditioning == "spectral":
        size = np.linalg.svd(x, compute_uv=False)[0]
    elif preconditioning == "schatten":  # (sum of s^4)^(1/4), from the Gram matrix
        size = np.sum(np.linalg.svd(x, compute_uv=False) ** 4) ** 0.25
    elif preconditioning in ("aol", "aol_out"):  # one number for each unit of the shorter side
        m, n = x.shape
        if n < m or (n == m and preconditioning == "aol"):
            size = np.sqrt(np.abs(x.conj().T @ x).sum(axis=0))[None, :]
        else:
            size = np.sqrt(np.abs(x @ x.conj().T).sum(axis=1))[:, None]
    else:
        raise ValueError(preconditioning)
    size = safety * size + eps
    return np.divide(x, size, out=np.zeros_like(x), where=size > 0)


def newton_schulz(x, table="jordan", steps=5, preconditioning="frobenius", eps=1e-30):
    """The Newton-Schulz iteration, in the order in which the papers write it."""
    x = pre_normalize(x, preconditioning, eps, safety=1.01 if table == "polar_express" else 1.0)
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
    raise ValueError(d)


# --- factors of the shape -----------------------------------------------------------------------


def shape_factor(m, n, shape_scale="spectral"):
    return {
        "spectral": np.sqrt(m / n),
        "max": np.sqrt(max(1.0, m / n)),
        "none": 1.0,
    }[shape_scale]


def rms_factor(m, n, rms, norm="none", match_frobenius=False):
    """What an ideal update is multiplied by for the root of its mean square to be ``rms``."""
    if norm == "none" or match_frobenius:  # min(m, n) singular values of one
        squares = min(m, n)
    elif norm.endswith("row"):  # m rows of length one
        squares = m
    else:  # n columns of length one
        squares = n
    return rms / np.sqrt(squares / (m * n))


# --- one step -----------------------------------------------------------------------------------


def momentum(m_prev, g, t, beta=0.95, nesterov=False, bias_correction=False):
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
    w, m_prev, g, t, *, learning_rate=1.0, beta=0.95, nesterov=False, bias_correction=False,
    table="jordan", steps=5, preconditioning="frobenius", eps=1e-30, norm="col_row", norm_eps=1e-8,
    match_frobenius=False, adaptive=False, shape_scale="spectral", consistent_rms=None,
    weight_decay=0.0,
):  # fmt: skip
    """Paper, algorithm 1, with every option: ``(what is added to w, the new momentum buffer)``."""
    # momentum
    direction, m_new = momentum(m_prev, g, t, beta, nesterov, bias_correction)
    # orthogonalize
    u = polar_factor(direction, table, steps, preconditioning, eps)
    # normalize
    o = norm_dir(u, norm, norm_eps)
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
    return -learning_rate * (o + weight_decay * w), m_new


def adamw_step(
    w, m_prev, v_prev, g, t, *, learning_rate=1.0, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0,
    weight_decay=0.0,
):  # fmt: skip
    """AdamW for the leaves that are no matrices: ``(what is added to w, m, v)``."""
    m = b1 * m_prev + (1 - b1) * g
    v = b2 * v_prev + (1 - b2) * np.abs(g) ** 2
    m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
    return -learning_rate * (m_hat / (np.sqrt(v_hat + eps_root) + eps) + weight_decay * w), m, v


# --- the optimizers that Muon+ is compared with, from their published code ----------------------
#
# Each takes w (out, in) before the step, its state and a gradient, and returns what is added to w
# and the new state. The states are those of the code: sums without (1 - beta) in Mano.


def normuon_step(
    w, state, g, *, learning_rate=1.0, beta=0.95, beta2=0.95, nu_eps=1e-10, rule="code",
    nesterov=True, weight_decay=0.0,
):  # fmt: skip
    """zichongli5/NorMuon @d45c9a4; ``rule="paper"`` is arXiv:2510.05491, algorithm 1."""
    m, v = state
    rows, columns = w.shape
    m = m + (1 - beta) * (g - m)
    o = newton_schulz(g + beta * (m - g) if nesterov else m)
    v = v + (1 - beta2) * (np.mean(np.abs(o) ** 2, axis=1, keepdims=True) - v)
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


# The last four of You Jiacheng's five rows of 2025 (x.com/YouJiacheng/status/1905861218138804534).
YOU_TURBO = [
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
