"""Writes a file of the form that `python -m lab.parity` reads, computed by PyTorch.

Models, optimizer and schedules are transcribed from their equations, and share no line with
`examples` or `optax_muonplus`. No test runs this: PyTorch is not a dependency, and the file that it
wrote is `lab/tests/published_training.npz`. To write it again, or to repeat the training that
another file records and see by how much this transcription differs from it:

    python -m lab.tests.support.published_training --write lab/tests/published_training.npz
    python -m lab.tests.support.published_training --repeat FILE.npz --heads 3
"""

import argparse
import math

import numpy as np
import torch

from lab.tests.support.published_models import MODELS, nats

JORDAN = (3.4445, -4.7750, 2.0315)
NORMS = ("none", "col", "row", "col_row", "row_col")
HEADS, LAYERS, WIDTH, VOCABULARY, POSITIONS = 2, 2, 16, 31, 10
INNER = {"gpt": 64, "llama": 40}
STEPS, MICRO_BATCHES, ROWS, TOKENS = 40, 3, 2, 8
RATE, DECAY, BETA, ADAM_BETAS, ADAM_EPS, GUARD = 0.01, 0.1, 0.95, (0.95, 0.95), 1e-8, 1e-7


# The update


def polar(g):
    """Five Newton-Schulz steps with Jordan's coefficients."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.square().sum().sqrt() + GUARD)
    a, b, c = JORDAN
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def normalized(u, norm):
    """Unit columns (over the outputs) and rows (over the inputs) in the order of the name."""
    for direction in () if norm == "none" else norm.split("_"):
        u = u / torch.sqrt(u.square().sum(0 if direction == "col" else 1, keepdim=True) + GUARD)
    return u


def is_matrix(name, x):
    return x.ndim == 2 and not any(part in name for part in ("wte", "wpe", "embed", "lm_head"))


def update(p, grads, state, norm, rate, step):
    """One step; the state is the momentum of a matrix, or both moments of another parameter."""
    b1, b2 = ADAM_BETAS
    for name, g in grads.items():
        p[name] = p[name] * (1 - rate * DECAY)
        if is_matrix(name, g):
            (m,) = state.get(name, (torch.zeros_like(g),))
            m = BETA * m + g
            state[name] = (m,)
            u = normalized(polar(g + BETA * m), norm)
            p[name] = p[name] - rate * math.sqrt(g.shape[0] / g.shape[1]) * u
        else:
            m, v = state.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g.square()
            state[name] = (m, v)
            debias = math.sqrt(1 - b2**step) / (1 - b1**step)
            p[name] = p[name] - rate * debias * m / (v.sqrt() + ADAM_EPS)


def clipped(grads):
    size = torch.sqrt(sum(g.square().sum() for g in grads.values()))
    return {name: g * torch.clamp(1 / (size + 1e-6), max=1) for name, g in grads.items()}


def share(family, step, steps):
    """The share of the peak rate."""
    if family == "gpt":
        hold = int(0.4 * steps)
        return 1.0 if step < hold else max(0.1, 1 - (step - hold) / (steps - hold))
    warmup = int(0.1 * steps)
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(family, init, inputs, targets, norm, heads, dtype):
    """The loss of each step before its update, mean of the micro-batches."""
    p = {name: torch.tensor(x, dtype=dtype) for name, x in init.items()}
    state, losses = {}, []
    for step, (rows, wanted) in enumerate(zip(inputs, targets, strict=True)):
        leaves = {name: x.detach().requires_grad_() for name, x in p.items()}
        of_batches = [
            nats(MODELS[family](leaves, torch.tensor(x), heads), torch.tensor(y))
            for x, y in zip(rows.astype(np.int64), wanted.astype(np.int64), strict=True)
        ]
        loss = sum(of_batches) / len(of_batches)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        p = {name: x.detach() for name, x in leaves.items()}
        rate = RATE * share(family, step, len(inputs))
        update(p, clipped(dict(zip(p, grads, strict=True))), state, norm, rate, step + 1)
        losses.append(loss.item())
    return np.array(losses)


def logits_of(family, init, tokens, heads, dtype):
    p = {name: torch.tensor(x, dtype=dtype) for name, x in init.items()}
    return MODELS[family](p, torch.tensor(tokens.astype(np.int64)), heads).numpy()


# A file


def published_shapes(family):
    """Published names and shapes, (out, in)."""
    d, f, shapes = WIDTH, INNER[family], {}
    if family == "gpt":
        shapes["transformer.wte.weight"] = (VOCABULARY, d)
        shapes["transformer.wpe.weight"] = (POSITIONS, d)
        sizes = {"attn.c_attn": (3 * d, d), "attn.c_proj": (d, d)}
        sizes |= {"mlp.c_fc": (f, d), "mlp.c_proj": (d, f)}
        for i in range(LAYERS):
            for part, shape in {"ln_1": (d,), "ln_2": (d,), **sizes}.items():
                shapes[f"transformer.h.{i}.{part}.weight"] = shape
                shapes[f"transformer.h.{i}.{part}.bias"] = shape[:1]
        return {**shapes, "transformer.ln_f.weight": (d,)}
    shapes["model.embed_tokens.weight"] = (VOCABULARY, d)
    sizes = {f"self_attn.{part}_proj": (d, d) for part in "qkvo"}
    sizes |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    sizes |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in sizes.items()}
    return {**shapes, "model.norm.weight": (d,), "lm_head.weight": (VOCABULARY, d)}


def initial(family, rng):
    """Normal values. Scales and biases differ too: a permutation of theirs changes the losses."""
    params = {}
    for name, shape in published_shapes(family).items():
        is_scale = len(shape) == 1 and name.endswith("weight")
        deviation = 0.02 if len(shape) == 2 else 0.1
        params[name] = (is_scale + deviation * rng.normal(size=shape)).astype(np.float32)
    return params


def text(rng):
    """Rows of a Markov chain in which each token has three followers: something to learn."""
    followers = rng.integers(0, VOCABULARY, (VOCABULARY, 3))
    rows = np.empty((STEPS, MICRO_BATCHES, ROWS, TOKENS + 1), np.int32)
    rows[..., 0] = rng.integers(0, VOCABULARY, rows.shape[:-1])
    for t in range(TOKENS):
        rows[..., t + 1] = followers[rows[..., t], rng.integers(0, 3, rows.shape[:-1])]
    return rows[..., :-1].copy(), rows[..., 1:].copy()


def write(path):
    """Writes the small file."""
    rng = np.random.default_rng(0)
    inputs, targets = text(rng)
    found = {"inputs": inputs, "targets": targets}
    for family in MODELS:
        init = initial(family, rng)
        found |= {f"{family}/init/{name}": x for name, x in init.items()}
        found[f"{family}/logits"] = logits_of(family, init, inputs[0, 0], HEADS, torch.float32)
        for norm in NORMS:
            losses = train(family, init, inputs, targets, norm, HEADS, torch.float32)
            found[f"{family}/losses/{norm}"] = losses
    np.savez_compressed(path, **found)


def repeat(path, heads):
    """Prints the differences from a file, of this transcription in float32 and in float64."""
    with np.load(path) as file:
        data = dict(file)
    for family in MODELS:
        prefix = f"{family}/init/"
        init = {k.removeprefix(prefix): x for k, x in data.items() if k.startswith(prefix)}
        for dtype in (torch.float32, torch.float64):
            own = logits_of(family, init, data["inputs"][0, 0], heads, dtype)
            print(family, dtype, f"logits {np.abs(own - data[f'{family}/logits']).max():.1e}")
            for key, losses in data.items():
                if key.startswith(f"{family}/losses/"):
                    norm = key.rpartition("/")[2]
                    own = train(family, init, data["inputs"], data["targets"], norm, heads, dtype)
                    differences = np.abs(own / losses - 1)
                    print(f"  {norm}: {differences.max():.1e} at step {differences.argmax()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write")
    parser.add_argument("--repeat")
    parser.add_argument("--heads", type=int)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
    if arguments.repeat:
        repeat(arguments.repeat, arguments.heads)
