"""The paper's GPT and LLaMA in PyTorch, transcribed from their equations.

They are functions of parameters by their published names. `published_training`, beside this file,
trains them; no test imports this, as PyTorch is not a dependency.

Glossary of shapes: B rows, T tokens, D width, H heads, K = D / H, V vocabulary.
"""

import math

import torch


def layer_norm(x, p, name):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(x, weight, epsilon):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def linear(x, p, name):
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def attention(q, k, v, heads):
    """Causal attention of (B, T, D) in H heads."""
    b, t, d = q.shape
    q, k, v = (x.reshape(b, t, heads, d // heads).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(d // heads)
    later = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, d)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt(p, tokens, heads):
    """Logits (B, T, V) of tokens (B, T)."""
    wte, wpe = p["transformer.wte.weight"], p["transformer.wpe.weight"]
    x = wte[tokens] + wpe[: tokens.shape[1]]
    for i in range(layers_of(p)):
        block = f"transformer.h.{i}"
        fused = linear(layer_norm(x, p, f"{block}.ln_1"), p, f"{block}.attn.c_attn")
        mixed = attention(*fused.chunk(3, dim=-1), heads)
        x = x + linear(mixed, p, f"{block}.attn.c_proj")
        wide = gelu(linear(layer_norm(x, p, f"{block}.ln_2"), p, f"{block}.mlp.c_fc"))
        x = x + linear(wide, p, f"{block}.mlp.c_proj")
    return rms_norm(x, p["transformer.ln_f.weight"], 1e-6) @ wte.T


def rotated(x, heads):
    """Each pair (i, i + K / 2) of a head as a complex number, turned by its position."""
    b, t, d = x.shape
    half = d // heads // 2
    x = x.reshape(b, t, heads, 2, half)
    turns = torch.arange(t, dtype=x.dtype)[:, None] * 10_000.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    unit = torch.polar(torch.ones_like(turns), turns)[None, :, None]
    turned = torch.complex(x[..., 0, :], x[..., 1, :]) * unit
    return torch.stack([turned.real, turned.imag], dim=3).reshape(b, t, d)


def llama(p, tokens, heads):
    """Logits (B, T, V) of tokens (B, T)."""
    x = p["model.embed_tokens.weight"][tokens]
    for i in range(layers_of(p)):
        block = f"model.layers.{i}"
        y = rms_norm(x, p[f"{block}.input_layernorm.weight"], 1e-5)
        q, k, v = (linear(y, p, f"{block}.self_attn.{part}_proj") for part in "qkv")
        mixed = attention(rotated(q, heads), rotated(k, heads), v, heads)
        x = x + linear(mixed, p, f"{block}.self_attn.o_proj")
        y = rms_norm(x, p[f"{block}.post_attention_layernorm.weight"], 1e-5)
        gate = linear(y, p, f"{block}.mlp.gate_proj")
        wide = gate * torch.sigmoid(gate) * linear(y, p, f"{block}.mlp.up_proj")
        x = x + linear(wide, p, f"{block}.mlp.down_proj")
    return linear(rms_norm(x, p["model.norm.weight"], 1e-5), p, "lm_head")


MODELS = {"gpt": gpt, "llama": llama}


def layers_of(p):
    return len([name for name in p if name.endswith(("ln_1.weight", "input_layernorm.weight"))])


def nats(logits, targets):
    return -torch.log_softmax(logits, dim=-1).gather(2, targets[..., None]).mean()
