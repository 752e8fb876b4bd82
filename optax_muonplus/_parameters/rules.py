"""What names say about parameters: the default rules, in the order in which they are asked.

A name stands for a whole part of a path, with or without a counter behind it: ``Embed_0``,
``ln_1``. Most are looked for in the module that owns the leaf and in the leaf itself, so that the
layers of a network called ``time_embed`` stay matrices.
"""

from optax_muonplus._parameters.layouts import LAYOUTS, PATCHES
from optax_muonplus._parameters.rule import CONVOLUTION, KERNEL, TORCH, Rule


def _owner_or_leaf(names: str) -> str:
    return rf"(?i)(^|/)({names})(/[^/]*)?$"


def _leaf(names: str) -> str:
    return rf"(?i)(^|/)({names})(_?\d+)?$"


# Not in a part of the network that is repeated or has outputs of its own.
_TOP = r"(?i)^(?!(.*/)?[^/]*(\d|layers|blocks|att|mlp|ffn|feed|moe|expert|cell)[^/]*/)(.*/)?"

_ADAMW = (
    Rule(r"(?i)(^|/|_)(bias|scale|offset|gain|gamma|beta)(_?\d+)?$", None, reads="bias or scale"),
    Rule(r"[^/]/b$", None, reads="bias", library="Haiku"),  # it has a module above it
    *PATCHES,
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
    Rule(CONVOLUTION + r"1d" + KERNEL, None, 2, "depthwise"),
    Rule(CONVOLUTION + KERNEL, None, 3, "depthwise or one channel", "", (None, 1, None)),
    Rule(CONVOLUTION + KERNEL, None, 4, "depthwise or one channel", "", (None, None, 1, None)),
    Rule(CONVOLUTION + r"/weight$", None, 3, "depthwise or one channel", TORCH, (None, 1, None)),
    Rule(
        CONVOLUTION + r"/weight$", None, 4, "depthwise or one channel", TORCH, (None, 1, None, None)
    ),
)

DEFAULT_RULES: tuple[Rule, ...] = (*_ADAMW, *LAYOUTS)
