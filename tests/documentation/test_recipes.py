"""Recipes of the page are their sources: each line runs on a small tree, against float64 NumPy.

A tree has names and sizes of heads of published weights. A source is transcribed as groups: the
first pattern that is found in a path gives the rule ``(w, g, memory, t) -> D`` of ``W - rate D``.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.documents import PAGES
from tests.support.reference_coefficients import JORDAN, POLAR_EXPRESS

PAGE = PAGES["howto/recipes.md"]
STEPS, PEAK = 100_000, 3e-4  # of the page's first cell
DEEPSEEK = 8 * JORDAN + 2 * [(2, -1.5, 0.5)]


def run_page(title):
    """Runs the first cell and those of one section; returns their names."""
    start, *sections = re.split(r"^## ", PAGE, flags=re.M)
    (section,) = [x for x in sections if x.splitlines()[0] == title]
    names = {}
    for cell in re.findall(r"```{code-cell}\n(.*?)```", start + section, re.S):
        exec(compile(cell, title, "exec"), names)
    return names


# --- rules of the sources -----------------------------------------------------------------------


def newton_schulz(x, rows, safety=1.0):
    x = x / (safety * np.linalg.norm(x))
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(w, g, memory, t, *, rows, scale, decay=0.0, nesterov=True, safety=1.0, mu=0.95):
    """The momentum is a sum, as in the reports: its size has no effect on a polar factor."""
    memory["m"] = mu * memory.get("m", 0.0) + g
    o = newton_schulz(mu * memory["m"] + g if nesterov else memory["m"], rows, safety)
    return scale(*w.shape) * o + decay * w


def cut(w, g, memory, t, *, rule, size=None):
    """The rule for each block of so many rows, or for each index of a first axis."""
    blocks = [x if size is None else x.reshape(-1, size, x.shape[-1]) for x in (w, g)]
    parts = [rule(*x, memory.setdefault(i, {}), t) for i, x in enumerate(zip(*blocks, strict=True))]
    return np.stack(parts).reshape(w.shape)


def adamw(w, g, memory, t, *, b1, b2, eps, decay=0.0, rate=1.0):
    m = memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
    v = memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g**2
    step = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)
    return rate * (step + decay * w)


def rms(size):
    return lambda n, m: size * np.sqrt(max(n, m))


def cosine(x):
    return (1 + np.cos(np.pi * np.clip(x, 0, 1))) / 2


def piecewise(*points):
    """Straight lines between (step, rate)."""
    return lambda t: np.interp(t, *zip(*points, strict=True))


def stable_then_cosine(peak, warmup, stop, length):
    return lambda t: peak * min(t / warmup, 1) * (0.1 + 0.9 * cosine((t - stop) / length))


# --- Qwen3.8-Flash-Next: section 3.1 ------------------------------------------------------------

GATED = {
    "embed_tokens/weight": (48, 16),
    "layers/1/ple/ple_embedding/ngram_embedding/weight": (40, 8),
    "layers/1/ple/key_proj/weight": (32, 24),
    "layers/1/ple/value_proj/weight": (16, 24),
    "layers/2/linear_attn/in_proj_qkv/weight": (3 * 128, 16),
    "layers/2/linear_attn/in_proj_z/weight": (128, 16),
    "layers/2/linear_attn/in_proj_a/weight": (3, 16),
    "layers/2/linear_attn/in_proj_b/weight": (3, 16),
    "layers/2/linear_attn/conv1d/weight": (3 * 128, 1, 4),
    "layers/2/linear_attn/A_log": (3,),
    "layers/2/linear_attn/dt_bias": (3,),
    "layers/2/linear_attn/norm/weight": (128,),
    "layers/2/linear_attn/out_proj/weight": (16, 128),
    "layers/3/self_attn/q_proj/weight": (2 * 2 * 256, 16),
    "layers/3/self_attn/k_proj/weight": (256, 16),
    "layers/3/self_attn/v_proj/weight": (256, 16),
    "layers/3/self_attn/q_norm/weight": (256,),
    "layers/3/self_attn/indexer/index_qk_proj/weight": (24, 16),
    "layers/3/self_attn/o_proj/weight": (16, 512),
    "layers/3/attn_hyper_connection/hc_norm/weight": (64,),
    "layers/3/attn_hyper_connection/input_mix_weight_down/weight": (2, 64),
    "layers/3/attn_hyper_connection/input_mix_weight_up/weight": (64, 2),
    "layers/3/attn_hyper_connection/block_inject_weight/weight": (4, 64),
    "layers/3/mlp/gate/weight": (6, 16),
    "layers/3/mlp/experts/gate_up_proj": (2, 2 * 640, 16),
    "layers/3/mlp/experts/down_proj": (2, 16, 640),
    "layers/3/mlp/shared_expert/gate_proj/weight": (640, 16),
    "layers/3/mlp/shared_expert/up_proj/weight": (640, 16),
    "layers/3/mlp/shared_expert/down_proj/weight": (16, 640),
    "layers/3/mlp/shared_expert_gate/weight": (1, 16),
    "norm/weight": (16,),
    "lm_head/weight": (48, 16),
}
QWEN = functools.partial(muon, rows=POLAR_EXPRESS, scale=rms(0.2), safety=1.01)
PLAIN = functools.partial(adamw, b1=0.9, b2=0.999, eps=1e-8)


def gated_queries(w, g, memory, t):
    """Each head has its query, a matrix for Muon, above its gate, for AdamW."""
    w, g = (x.reshape(-1, 2, 256, x.shape[-1]) for x in (w, g))
    made = [
        cut(w[:, i], g[:, i], memory.setdefault(name, {}), t, rule=rule)
        for i, (name, rule) in enumerate((("query", QWEN), ("gate", PLAIN)))
    ]
    return np.stack(made, axis=1).reshape(-1, w.shape[-1])


QWEN_GROUPS = {
    "q_proj": gated_queries,
    "self_attn/[kv]_proj": functools.partial(cut, rule=QWEN, size=256),
    "in_proj_qkv": functools.partial(cut, rule=QWEN, size=128),
    "gate_up_proj": functools.partial(cut, rule=functools.partial(cut, rule=QWEN, size=640)),
    "experts/down_proj": functools.partial(cut, rule=QWEN),
    "shared_expert/|self_attn/o_proj|linear_attn/out_proj|ple/(key|value)_proj": QWEN,
    "": PLAIN,
}

# --- DeepSeek-V4: algorithm 1, sections 2.4 and 4.2.2 -------------------------------------------

COMPRESSED = {
    "embed/weight": (48, 16),
    "layers/3/attn_norm/weight": (16,),
    "layers/3/attn/wq_a/weight": (24, 16),
    "layers/3/attn/q_norm/weight": (24,),
    "layers/3/attn/wq_b/weight": (64, 24),
    "layers/3/attn/wkv/weight": (32, 16),
    "layers/3/attn/wo_b/weight": (16, 24),
    "layers/3/attn/compressor/wkv/weight": (64, 16),
    "layers/3/attn/compressor/wgate/weight": (64, 16),
    "layers/3/hc_attn_fn": (24, 64),
    "layers/3/hc_attn_base": (24,),
    "layers/3/hc_attn_scale": (3,),
    "layers/3/ffn/gate/weight": (6, 16),
    "layers/3/ffn/experts/0/w1/weight": (24, 16),
    "layers/3/ffn/experts/0/w2/weight": (16, 24),
    "layers/3/ffn/experts/0/w3/weight": (24, 16),
    "norm/weight": (16,),
    "head/weight": (48, 16),
}
DEEPSEEK_GROUPS = {
    "embed|head|norm|hc_attn_(base|scale)": functools.partial(
        adamw, b1=0.9, b2=0.95, eps=1e-20, decay=0.1
    ),
    "": functools.partial(muon, rows=DEEPSEEK, scale=rms(0.18), decay=0.1),
}

# --- Moonlight: sections 2.2 and 3.3; Kimi K2: algorithm 1; Kimi K3: sections 2.5 and 3.3 --------

LATENT = {
    "embed_tokens/weight": (48, 16),
    "layers/1/input_layernorm/weight": (16,),
    "layers/1/self_attn/q_a_proj/weight": (24, 16),
    "layers/1/self_attn/q_a_layernorm/weight": (24,),
    "layers/1/self_attn/q_b_proj/weight": (2 * 192, 24),
    "layers/1/self_attn/kv_a_proj_with_mqa/weight": (20, 16),
    "layers/1/self_attn/kv_a_layernorm/weight": (12,),
    "layers/1/self_attn/kv_b_proj/weight": (2 * 256, 12),
    "layers/1/self_attn/o_proj/weight": (16, 256),
    "layers/1/mlp/gate/weight": (6, 16),
    "layers/1/mlp/gate/e_score_correction_bias": (6,),
    "layers/1/mlp/experts/0/gate_proj/weight": (24, 16),
    "layers/1/mlp/experts/0/up_proj/weight": (24, 16),
    "layers/1/mlp/experts/0/down_proj/weight": (16, 24),
    "norm/weight": (16,),
    "lm_head/weight": (48, 16),
}
LINEAR = {
    "layers/0/self_attn/q_proj/weight": (256, 16),
    "layers/0/self_attn/k_proj/weight": (256, 16),
    "layers/0/self_attn/v_proj/weight": (256, 16),
    "layers/0/self_attn/o_proj/weight": (16, 256),
    "layers/0/self_attn/A_log": (2,),
}
VECTORS = "embed|lm_head|norm|bias|A_log"
KIMI = functools.partial(muon, rows=5 * JORDAN, scale=rms(0.2), decay=0.1, nesterov=False)
NADAM = "of this library, since the reports of Kimi do not state it"
MOONLIGHT_GROUPS = {
    VECTORS: functools.partial(adamw, b1=0.9, b2=0.95, eps=1e-8, decay=0.1),
    "": functools.partial(muon, rows=5 * JORDAN, scale=rms(0.2), decay=0.1),
}
K2_GROUPS = {VECTORS: NADAM, "": KIMI}
K3_GROUPS = {
    VECTORS: NADAM,
    "self_attn/[qkv]_proj|kv_b_proj": functools.partial(cut, rule=KIMI, size=128),
    "q_b_proj": functools.partial(cut, rule=KIMI, size=192),
    "": KIMI,
}

# --- nanochat @92d63d4: optim.py, gpt.py, base_train.py -----------------------------------------

SMALL_GPT = {
    "transformer/wte/weight": (48, 16),
    "transformer/h/1/attn/c_q/weight": (16, 16),
    "transformer/h/1/attn/c_k/weight": (8, 16),
    "transformer/h/1/attn/ve_gate/weight": (2, 12),
    "transformer/h/1/attn/c_proj/weight": (16, 16),
    "transformer/h/1/mlp/c_fc/weight": (64, 16),
    "transformer/h/1/mlp/c_proj/weight": (16, 64),
    "value_embeds/1/weight": (48, 8),
    "resid_lambdas": (2,),
    "x0_lambdas": (2,),
    "smear_gate/weight": (1, 24),
    "smear_lambda": (1,),
    "backout_lambda": (1,),
    "lm_head/weight": (48, 16),
}
NANO_ROWS = [  # Polar Express for five steps, safety 0.02
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def nano_beta(t):
    start = 0.35 * STEPS
    if t < 400:
        return 0.85 + (0.97 - 0.85) * t / 400
    return 0.97 - (0.97 - 0.90) * max(0, (t - start) / (STEPS - start))


def normuon(w, g, memory, t, *, decay_by_shape=True):
    m, n = w.shape
    beta, decay = nano_beta(t), 0.28 * cosine(t / STEPS)
    mean = memory["m"] = beta * memory.get("m", 0.0) + (1 - beta) * g
    x = (1 - beta) * g + beta * mean
    x = x * (np.linalg.norm(x) / np.sqrt(m)) / np.linalg.norm(x, axis=1, keepdims=True)
    o = newton_schulz(x, NANO_ROWS, safety=1.01)
    o = o * np.sqrt(min(m, n)) / np.linalg.norm(o)
    v = np.mean(o**2, axis=1 if m >= n else 0, keepdims=True)
    v = memory["v"] = 0.9 * memory.get("v", 0.0) + 0.1 * v
    scaled = o / np.sqrt(v)
    scaled *= np.linalg.norm(o) / np.linalg.norm(scaled)
    factor = max(1, m / n) ** 0.5
    by_shape = factor if decay_by_shape else 1.0
    return factor * scaled + by_shape * decay * w * (scaled * w >= 0)


def nano_adam(rate, b1, b2, decay):
    """As a multiple of the rate of matrices, which has the same schedule."""
    return functools.partial(adamw, b1=b1, b2=b2, eps=1e-10, decay=decay, rate=rate / 0.02)


NANO_GROUPS = {
    "lm_head": nano_adam(0.008, 0.8, 0.96, 0.01),
    "wte": nano_adam(0.3, 0.8, 0.995, 0.001),
    "value_embeds": nano_adam(0.3 * 0.5, 0.8, 0.995, 0.01),
    "resid": nano_adam(0.5 * 0.01, 0.8, 0.95, 0.05),
    "x0": nano_adam(0.5, 0.96, 0.95, 0.0),
    "smear|backout": nano_adam(0.2, 0.8, 0.95, 0.0),
    # The page says that this cannot be typed.
    "mlp/c_fc": functools.partial(normuon, decay_by_shape=False),
    "": normuon,
}

# --- modded-nanogpt @f411b3d: train_gpt_simple.py -----------------------------------------------

SPEEDRUN = {
    "embed/weight": (48, 16),
    "blocks/0/attn/q/weight": (16, 16),
    "blocks/0/attn/proj/weight": (16, 16),
    "blocks/0/attn/proj/bias": (16,),
    "blocks/0/mlp/fc/weight": (64, 16),
    "blocks/0/mlp/fc/bias": (64,),
    "blocks/0/mlp/proj/weight": (16, 64),
    "blocks/0/norm1/gains": (16,),
    "proj/weight": (48, 16),
    "proj/bias": (48,),
}


def track_3_adam(rate):
    return functools.partial(adamw, b1=0.8, b2=0.95, eps=1e-10, decay=0.001, rate=rate / 0.025)


SPEEDRUN_GROUPS = {
    "embed": track_3_adam(0.7),
    "^proj/weight": track_3_adam(0.004),
    "bias|gains": track_3_adam(0.015),
    "": functools.partial(
        muon, rows=12 * [(2, -1.5, 0.5)], decay=0.05, scale=lambda n, m: max(1, n / m) ** 0.5
    ),
}

# --- all ----------------------------------------------------------------------------------------

# Parameters, rules, the rate of a step, and the bound of the norm of all gradients.
RECIPES = {
    "Qwen3.8-Flash-Next": (GATED, QWEN_GROUPS, lambda t: PEAK, 0.5),
    "DeepSeek-V4": (
        COMPRESSED,
        DEEPSEEK_GROUPS,
        stable_then_cosine(2.7e-4, 2000, 0.9 * STEPS, 0.1 * STEPS),
        None,
    ),
    "Kimi K2": (LATENT, K2_GROUPS, stable_then_cosine(2e-4, 500, 149_000, 82_000), None),
    "Kimi K3": (
        LATENT | LINEAR,
        K3_GROUPS,
        lambda t: PEAK * min(t / 1000, 1) * cosine((t - 1000) / (STEPS - 1000)),
        None,
    ),
    "Moonlight": (
        LATENT,
        MOONLIGHT_GROUPS,
        lambda t: (
            min(t / 2000, 1) * (4.2e-5 + 3.78e-4 * cosine((t - 2000) / 159_000))
            if t <= 161_000
            else piecewise((161_000, 4.2e-5), (161_100, 1e-4), (176_000, 0))(t)
        ),
        None,
    ),
    "nanochat": (
        SMALL_GPT,
        NANO_GROUPS,
        piecewise((0, 0.02 / 40), (39, 0.02), (0.35 * STEPS, 0.02), (STEPS, 0.001)),
        None,
    ),
    "Jordan's speedrun": (
        SPEEDRUN,
        SPEEDRUN_GROUPS,
        piecewise((0, 0.025), (0.3 * STEPS, 0.025), (STEPS, 0)),
        None,
    ),
}


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *modules, name = path.split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = jnp.asarray(leaf, jnp.float32)
    return tree


def flat(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64)
        for path, x in pairs
    }


@pytest.mark.parametrize("title", RECIPES)
def test_three_steps_are_those_of_the_source(title):
    shapes, groups, rate, bound = RECIPES[title]
    names = run_page(title)
    tx, schedule = names["tx"], names.get("rate", rate)
    rng = np.random.default_rng(0)
    memories = {path: {} for path in shapes}
    params = nested({path: rng.standard_normal(shape) for path, shape in shapes.items()})
    state, update = tx.init(params), jax.jit(tx.update)
    for t in range(3):
        grads = {path: rng.standard_normal(shape) for path, shape in shapes.items()}
        updates, state = update(nested(grads), state, params)
        made, before = flat(updates), flat(params)
        clip = 1 if bound is None else bound / np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        for path, g in grads.items():
            rule = next(rule for pattern, rule in groups.items() if re.search(pattern, path))
            if rule is NADAM:
                continue
            expected = -float(schedule(t)) * rule(before[path], min(clip, 1) * g, memories[path], t)
            largest = np.abs(expected).max()
            np.testing.assert_allclose(
                made[path], expected, rtol=0, atol=2e-5 * largest, err_msg=f"{path}, step {t}"
            )
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("title", [x for x in RECIPES if x != "Qwen3.8-Flash-Next"])
def test_rates_are_those_of_the_source(title):
    schedule, rate = run_page(title)["rate"], RECIPES[title][2]
    for t in (0, 1, 39, 999, 2000, 30_001, 70_000, 95_000, 99_999, 150_000, 161_050, 170_000):
        if t < STEPS or title in ("Kimi K2", "Moonlight"):
            np.testing.assert_allclose(schedule(t), rate(t), rtol=2e-4, atol=1e-9, err_msg=str(t))


def test_the_weight_clip_of_kimi_cannot_be_typed():
    tx = optax.chain(run_page("Kimi K2")["tx"], omp.contrib.qk_clip(100.0))
    params = nested({path: np.ones(shape) for path, shape in LATENT.items()})
    with pytest.raises(ValueError, match="latent"):
        tx.init(params)


# --- the tables of the page ---------------------------------------------------------------------


def rows_of(header):
    """The rows of the table whose header has these words, as lists of cells."""
    table = re.search(rf"^\|.*{re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[x.strip() for x in row.strip("|").split("|")] for row in table[1].splitlines()]


@pytest.mark.cpu_program
def test_exact_steps_cost_what_the_page_says():
    """Products of n x n and n x m matrices; ``test_operations.py`` counts those of programs."""
    exact = functools.partial(omp.polar.Orthogonalize, "polar_express", 8)
    half, full = (omp.polar.FastPolar(exact(compute_dtype=x)) for x in ("bfloat16", "float32"))
    prices = []
    for n, m in ((128, 2560), (512, 2048), (512, 1536), (512, 512)):
        optax_steps = 5 * (4 * n * n * m + 2 * n**3)
        assert half.flops((n, m)) / optax_steps == 8 / 5
        prices.append(full.flops((n, m)) / optax_steps)
    (row,) = rows_of("128 x 2560")
    np.testing.assert_allclose([float(x) for x in row], prices, atol=0.005)


def test_lengths_are_those_of_the_page():
    values = (
        np.linalg.svd(np.random.default_rng(0).standard_normal((256, 256)), compute_uv=False),
        np.logspace(0, -3, 256),
        np.logspace(0, -4, 256),
        1 / np.arange(1, 257),
    )
    tables = {
        "five": (5 * JORDAN, 1.0),
        "eight": (POLAR_EXPRESS, 1.01),
        "DeepSeek's": (DEEPSEEK, 1),
    }
    for name, *cells in rows_of("Gaussian"):
        rows, safety = tables[name.split()[0]]
        lengths = [
            np.sqrt(np.mean(np.diag(newton_schulz(np.diag(s), rows, safety)) ** 2)) for s in values
        ]
        np.testing.assert_allclose([float(x) for x in cells], lengths, atol=0.0051)
