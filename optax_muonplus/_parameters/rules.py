"""What names say about parameters: the default rules, in the order in which they are asked.

A name stands for a whole part of a path, with or without a counter behind it: ``Embed_0``,
``ln_1``. Most are looked for in the module that owns the leaf and in the leaf itself, so that the
layers of a network called ``time_embed`` stay matrices.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from optax_muonplus._parameters.agreement import (
    flax_gpt2_kernels,
    heads_do_not_disagree,
    heads_match_output,
)
from optax_muonplus._parameters.dimension_numbers import DimensionNumbers, MuonDimensionNumbers

Shape = tuple[int, ...]


class Rule(NamedTuple):
    """What parameters whose path matches are.

    Attributes:
      pattern: regular expression, searched in the path ``"blocks/0/attn/query/kernel"``.
      dimension_numbers: their dimension numbers, or None for the AdamW group.
      ndim: number of axes that the rule is for; None means any.
      reads: what it takes the parameter for, as ``describe`` shows it.
      library: whose convention that is; empty for what all have in common.
      sizes: of the axes: a number for that size, a letter for axes of one size, None for any.
      agrees: whether the leaves of the module that owns the parameter's layer, by their paths below
        it, allow this reading.
    """

    pattern: str
    dimension_numbers: DimensionNumbers | None
    ndim: int | None = None
    reads: str = ""
    library: str = ""
    sizes: tuple[int | str | None, ...] = ()
    agrees: Callable[[Mapping[str, Shape]], bool] | None = None


def _owner_or_leaf(names: str) -> str:
    return rf"(?i)(^|/)({names})(/[^/]*)?$"


def _leaf(names: str) -> str:
    return rf"(?i)(^|/)({names})(_?\d+)?$"


# Not in a part of the network that is repeated or has outputs of its own.
_TOP = r"(?i)^(?!(.*/)?[^/]*(\d|layers|blocks|att|mlp|ffn|feed|moe|expert|cell)[^/]*/)(.*/)?"
_KERNEL = r"/(kernel|w)$"  # Flax, Keras; Haiku
_CONV = r"(?i)(^|/)[^/]*conv[^/]*"
_PATCH = r"(?i)(^|/)([^/]*(embed|patch)[^/]*|stem)(/proj(ection)?|/conv)?"
_IN_OUT, _OUT_IN = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 0)
_TO_HEADS, _FROM_HEADS = MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers((0, 1), 2)
_HWIO, _OIHW = MuonDimensionNumbers((0, 1, 2), 3), MuonDimensionNumbers((1, 2, 3), 0)
_TORCH = "Equinox, PyTorch"
_QKV = r"([qkv]|query|key|value)(_proj|_projection)?|w[qkv]|wq_b|wkv_b"
_OUT = r"o|out|wo|o_proj|(attn_)?out_proj|attention_output"

_PATCHES = (  # They have "embed" in their names, and are matrices nevertheless.
    Rule(
        _PATCH + _KERNEL,
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
        _TORCH,
        (None, None, "k", "k"),
    ),
    Rule(r"(?i)(^|/)[^/]*patch[^/]*" + _KERNEL, _IN_OUT, 2, "patches: in, out", "Flax, Keras"),
    Rule(r"(?i)(^|/)[^/]*patch[^/]*/weight$", _OUT_IN, 2, "patches: out, in", _TORCH),
)

_ADAMW = (
    Rule(r"(?i)(^|/|_)(bias|scale|offset|gain|gamma|beta)(_?\d+)?$", None, reads="bias or scale"),
    Rule(r"[^/]/b$", None, reads="bias", library="Haiku"),  # it has a module above it
    *_PATCHES,
    Rule(
        _owner_or_leaf(r"[^/]*embed[^/]*|([^/]*_)?emb(_[^/]*|\d+)?|w[tp]e"), None, reads="embedding"
    ),
    # A norm has no kernel: "norm_proj/kernel" is a matrix.
    Rule(r"(?i)(^|/)([^/]*norm|ln|rms)(_[^/]*|\d+)?(/(?!kernel$|w$)[^/]*)?$", None, reads="norm"),
    # Unless nothing but its scale is meant: tunix calls that w, EasyDeL kernel.
    Rule(r"(?i)(^|/)[^/]*norm/(w|kernel)$", None, reads="norm"),
    Rule(
        _owner_or_leaf(r"(?!multi)([^/]*_)?(head|logits|unembed|readout)(_dense)?(_?\d+)?"),
        None,
        reads="head",
    ),
    Rule(r"(?i)^((params|model|transformer)/)*outputs?(/[^/]*)?$", None, reads="head"),
    Rule(
        _owner_or_leaf(
            r"logit_?(dense|proj(ection)?)|logits_?proj(ection)?|to_logit|([^/]*_)?classifier"
            r"|vocab_proj(ector|ection)?|qa_outputs|seq_relationship|dense_prediction"
            r"|(predictions|lm_head)/decoder"
        ),
        None,
        reads="head",
    ),
    Rule(_TOP + r"(output_layer|output_proj(ection)?|score)(/[^/]*)?$", None, reads="head"),
    Rule(
        _owner_or_leaf(r"pos(ition(s|al)?)?(_[^/]*)?|[^/]*_pos(ition)?"),
        None,
        reads="position table",
    ),
    Rule(
        _owner_or_leaf(r"(rel|relative)_[^/]*(pos|bias|table)[^/]*"), None, reads="position table"
    ),
    Rule(
        _leaf(r"cls|probe|latents|codebooks?|codevectors|([^/]*_)?(tokens?|tables?)"),
        None,
        reads="table of vectors",
    ),
    Rule(
        _leaf(
            r"([^/]*_)?(alpha|dt|tau|temperature|sinks?)|a_(log|real|imag)(_real|_imag)?|log_dt"
            r"|lambda_(re|im|log)|(nu|theta|gamma)_log|time_(decay|first|faaaa|(mix|maa)_[a-z])"
        ),
        None,
        reads="stacked vectors",
    ),
    Rule(_owner_or_leaf(r"shared_expert_gate"), None, reads="gate of one output"),
    Rule(_owner_or_leaf(r"[^/]*(depthwise|dw_?conv|conv_?dw)[^/]*"), None, reads="depthwise"),
    # (width, channels) of Griffin's temporal convolution; (.., width, 1, channels) elsewhere.
    Rule(_CONV + r"1d" + _KERNEL, None, 2, "depthwise"),
    Rule(_CONV + _KERNEL, None, 3, "depthwise or one channel", "", (None, 1, None)),
    Rule(_CONV + _KERNEL, None, 4, "depthwise or one channel", "", (None, None, 1, None)),
    Rule(_CONV + r"/weight$", None, 3, "depthwise or one channel", _TORCH, (None, 1, None)),
    Rule(_CONV + r"/weight$", None, 4, "depthwise or one channel", _TORCH, (None, 1, None, None)),
)

_LAYOUTS = (
    Rule(
        r"(^|/)(kernel|w|pointwise_kernel)$",
        _HWIO,
        4,
        "1x1 convolution: in, out",
        "Flax, Keras, Haiku",
        (1, 1, None, None),
    ),
    Rule(r"/weight$", _OIHW, 4, "1x1 convolution: out, in", _TORCH, (None, None, 1, 1)),
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
        rf"(^|/)({_QKV}){_KERNEL}",
        _TO_HEADS,
        3,
        "attention: in, (heads, head)",
        "MaxText, tunix, Keras",
        agrees=heads_match_output,
    ),
    Rule(
        rf"(^|/)({_OUT}){_KERNEL}",
        _FROM_HEADS,
        3,
        "attention: (heads, head), out",
        "MaxText, tunix, Keras",
        agrees=heads_match_output,
    ),
    Rule(
        r"(^|/)q_einsum/w$",
        MuonDimensionNumbers(1, (0, 2)),
        3,
        "attention: in, (heads, head)",
        "Gemma",
    ),
    Rule(
        r"(^|/)q?kv_einsum/w$",
        MuonDimensionNumbers(2, (1, 3)),
        4,
        "attention: in, (heads, head)",
        "Gemma",
    ),
    Rule(r"(^|/)attn_vec_einsum/w$", _FROM_HEADS, 3, "attention: (heads, head), out", "Gemma"),
    Rule(
        r"(?i)(^|/)[^/]*expert[^/]*/([^/]*/)?kernel$",
        MuonDimensionNumbers(1, 2),
        3,
        "experts: in, out",
        "Flax",
    ),
    Rule(
        r"(?i)(^|/)moe_?block(_\d+)?/(wi(_\d)?|wo)$",
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
    # Equinox and PyTorch name it so and store it as (out, in). So do Haliax's linear layers.
    Rule(r"(^|/)weight$", _OUT_IN, 2, "weight: out, in", "Equinox, PyTorch, Haliax"),
    Rule(
        r"(^|/)(weight_[ih]h(_l\d+)?|in_proj_weight)$",
        _OUT_IN,
        2,
        "weight: out, in",
        _TORCH,
    ),
    Rule(r"(^|/)([^/]*_)?kernel$", _IN_OUT, 2, "kernel: in, out", "Flax, Keras"),
    Rule(r"[^/]/w$", _IN_OUT, 2, "w: in, out", "Haiku, tunix"),
    Rule(r"", _IN_OUT, 2, "by default: in, out"),
)

DEFAULT_RULES: tuple[Rule, ...] = (*_ADAMW, *_LAYOUTS)
