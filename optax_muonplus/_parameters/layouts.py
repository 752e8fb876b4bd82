"""How parameters of known names lie: the default rules for matrices, in the order of asking."""

from optax_muonplus._parameters.agreement import (
    flax_gpt2_kernels,
    heads_do_not_disagree,
    heads_match_output,
    other_adapter_is_a_matrix,
)
from optax_muonplus._parameters.dimension_numbers import MuonDimensionNumbers
from optax_muonplus._parameters.rule import KERNEL, TORCH, Rule

_PATCH = r"(?i)(^|/)([^/]*(embed|patch)[^/]*|stem)(/proj(ection)?|/conv)?"
_IN_OUT, _OUT_IN = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 0)
_TO_HEADS, _FROM_HEADS = MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers((0, 1), 2)
_HWIO, _OIHW = MuonDimensionNumbers((0, 1, 2), 3), MuonDimensionNumbers((1, 2, 3), 0)
_QKV = r"([qkv]|query|key|value)(_proj|_projection)?|w[qkv]|wq_b|wkv_b"
_OUT = r"o|out|wo|o_proj|(attn_)?out_proj|attention_output"

PATCHES = (  # They have "embed" in their names, and are matrices nevertheless.
    Rule(
        _PATCH + KERNEL,
        _HWIO,
        4,
        "patches: height, width, in, out",
        "Flax, Keras, Haiku",
        ("k", "k", None, None),
    ),
    Rule(
        _PATCH + r"/weight$",
        _OIHW,
        4,
        "patches: out, in, height, width",
        TORCH,
        (None, None, "k", "k"),
    ),
    Rule(r"(?i)(^|/)[^/]*patch[^/]*" + KERNEL, _IN_OUT, 2, "patches: in, out", "Flax, Keras"),
    Rule(r"(?i)(^|/)[^/]*patch[^/]*/weight$", _OUT_IN, 2, "patches: out, in", TORCH),
)

LAYOUTS = (
    Rule(
        r"(^|/)(kernel|w|pointwise_kernel)$",
        _HWIO,
        4,
        "1x1 convolution: in, out",
        "Flax, Keras, Haiku",
        (1, 1, None, None),
    ),
    Rule(r"/weight$", _OIHW, 4, "1x1 convolution: out, in", TORCH, (None, None, 1, 1)),
    # Other convolutions are asked for: (3, 3, in, out) may be three stacked ones of width 3.
    # DenseGeneral (features, heads, head_dim) and back. Stacked (layer, in, out) looks alike.
    Rule(
        r"(^|/)(query|key|value)/kernel$",
        _TO_HEADS,
        3,
        "attention: in, (heads, head)",
        "Flax, Keras",
        agrees=heads_do_not_disagree,
    ),
    Rule(
        r"(^|/)out/kernel$",
        _FROM_HEADS,
        3,
        "attention: (heads, head), out",
        "Flax",
        agrees=heads_do_not_disagree,
    ),
    Rule(
        rf"(^|/)({_QKV}){KERNEL}",
        _TO_HEADS,
        3,
        "attention: in, (heads, head)",
        "MaxText, tunix, Keras",
        agrees=heads_match_output,
    ),
    Rule(
        rf"(^|/)({_OUT}){KERNEL}",
        _FROM_HEADS,
        3,
        "attention: (heads, head), out",
        "MaxText, tunix, Keras",
        agrees=heads_match_output,
    ),
    Rule(
        r"(^|/)q_einsum/(w|kernel)$",
        MuonDimensionNumbers(1, (0, 2)),
        3,
        "attention: in, (heads, head)",
        "Gemma",
    ),
    Rule(
        r"(^|/)q?kv_einsum/(w|kernel)$",
        MuonDimensionNumbers(2, (1, 3)),
        4,
        "attention: in, (heads, head)",
        "Gemma",
    ),
    Rule(
        r"(^|/)attn_vec_einsum/(w|kernel)$",
        _FROM_HEADS,
        3,
        "attention: (heads, head), out",
        "Gemma",
    ),
    Rule(
        r"(?i)(^|/)[^/]*expert[^/]*/([^/]*/)?kernel$",
        MuonDimensionNumbers(1, 2),
        3,
        "experts: in, out",
        "Flax",
    ),
    Rule(
        r"(?i)(^|/)(moe_?block(_\d+)?|routed_experts|gptossmlp)/(wi(_\d)?|wo)$",
        MuonDimensionNumbers(1, 2),
        3,
        "experts: in, out",
        "MaxText",
    ),
    Rule(
        r"(^|/)(c_attn|c_fc|c_proj|q_attn)/kernel$",
        _OUT_IN,
        2,
        "kernel: out, in",
        "GPT-2 of Transformers",
        agrees=flax_gpt2_kernels,
    ),
    Rule(r"(?i)(^|/)[^/]*lora_a(/w|/kernel)?$", _IN_OUT, 2, "LoRA: in, rank", "Flax, Qwix"),
    Rule(r"(?i)(^|/)[^/]*lora_b(/w|/kernel)?$", _IN_OUT, 2, "LoRA: rank, out", "Flax, Qwix"),
    Rule(
        r"lora_a$",
        _FROM_HEADS,
        3,
        "LoRA: (heads, head), rank",
        "Qwix",
        agrees=other_adapter_is_a_matrix,
    ),
    Rule(
        r"lora_b$",
        _TO_HEADS,
        3,
        "LoRA: rank, (heads, head)",
        "Qwix",
        agrees=other_adapter_is_a_matrix,
    ),
    # Equinox and PyTorch name it so and store it as (out, in). So do Haliax's linear layers.
    Rule(r"(^|/)weight$", _OUT_IN, 2, "weight: out, in", "Equinox, PyTorch, Haliax"),
    Rule(
        r"(^|/)(weight_[ih]h(_l\d+)?|in_proj_weight)$",
        _OUT_IN,
        2,
        "weight: out, in",
        TORCH,
    ),
    Rule(r"(^|/)([^/]*_)?kernel$", _IN_OUT, 2, "kernel: in, out", "Flax, Keras"),
    Rule(r"[^/]/w$", _IN_OUT, 2, "w: in, out", "Haiku, tunix"),
    Rule(r"", _IN_OUT, 2, "by default: in, out"),
)
