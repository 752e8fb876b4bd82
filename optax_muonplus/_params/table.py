"""The default rules, in order: the first one that fits decides. ``language.py`` has the syntax."""

from optax_muonplus._params import attention
from optax_muonplus._params import neighbours as near
from optax_muonplus._params.language import PathRule, adamw, matrix

_KERNEL = "/(kernel|w)"  # kernel in Flax and Keras, w in Haiku
_FLAX, _ANY = "Flax, Keras", "Flax, Keras, Haiku"
_TUNIX = "MaxText, tunix, Keras"
_TORCH, _ONE = "Equinox, PyTorch", "depthwise or one channel"
_WEIGHT = ("weight: out, in", "Equinox, PyTorch, Haliax")
_OWN = "(/*)?"  # the name is that of the parameter or of its module
COUNTER = r"(_?\d+)?"
_PATCH = r"(?i)(*(embed|patch)*|stem)(/proj(ection)?|/conv)?"
_CONV = "(?i)*conv*"
# Not in containers of stacked layers. Keras' transposed convolutions have outputs before inputs.
_STACK = r"(**/)?(layers|blocks|stages|stack*|scan*|h)/(?!\d)"
_WINDOW = f"(?i)^(?!{_STACK}|**_transpose)(**/)?*conv*/kernel"
_SIDES = ("width", "height width", "depth height width")
# Not in a part of the network that is repeated or has its own outputs.
TOP = (
    r"(?i)^(?!(**/)?*(\d|layers|block|att|mha|multi_?head|self|cross|mlp|ffn|feed|moe|expert|cell"
    r"|mixer|ssm|mamba|rnn|lstm|gru)*/)(**/)?"
)
LEAF = "(/(kernel|w|weight))?"
_NUMBERS = r"(/\d+){0,}"  # in lists
_EXPERT = "*expert*/(*/)?kernel"
_EMBED_PROJ = r"*emb(ed(ding)?)?s?_proj(ect(ion|or))?"
_EMBED = r"(*embed*|(*_)?emb(_*|\d+)?|w[tp]e)"
# A layer within an embedding module, which is not a table.
_LAYER = r"(*(proj(ection)?|dense|linear|mlp|conv|att|norm|layer|ffn|fc)*|lin|in|out|up|down|gate)/"
_DECAY = "(a|lambda|nu|theta|gamma)"

BIAS = "bias of stacked layers or heads"
DEFAULT_RULES: tuple[PathRule, ...] = (
    # Published recipes train adapters with AdamW.
    adamw("(?i)*lora(_*)?_([ab]|up|down)(/*){0,}|*lora*/([ab]|up|down)(/*)?", "LoRA factor"),
    adamw(
        r"(?i)(*_)?(bias(es|_[ih]h(_l\d+)?(_reverse)?)?|(scale|offset|gain|gamma|beta)s?|lambdas)"
        + COUNTER,
        "bias or scale",
    ),
    adamw("(?i)weight_g|parametrizations/*/original0", "gain of a weight norm", library="PyTorch"),
    adamw(
        r"(?i)(*_)?(skip|resid(ual)?|x0)_(weight|mix|gate|gain|lambda)(e?s)?", "weights of channels"
    ),
    adamw("*/b", "bias", library="Haiku"),  # always within a module
    adamw(rf"(?i)(*_)?b*{_NUMBERS}|\d+", BIAS, condition=near.is_bias),
    # Patch embeddings are matrices, in spite of "embed" in their names.
    matrix(_PATCH + _KERNEL, "patches: (side side in), out", _ANY),
    matrix(_PATCH + "/weight", "patches: out, (in side side)", _TORCH),
    matrix("(?i)*patch*" + _KERNEL, "patches: in, out", _FLAX),
    matrix(f"(?i){_EMBED_PROJ}{_KERNEL}", "kernel: in, out", _ANY),
    matrix(f"(?i){_EMBED_PROJ}/weight", *_WEIGHT),
    adamw(rf"(?i){_EMBED}{_OWN}", "embedding", condition=near.is_table),
    # Tables in lists and dicts. Networks that embed times have such names too, and biases.
    adamw(
        rf"(?i)(?!*time|*patch){_EMBED}{_NUMBERS}/(?!{_LAYER})*((/\d+){{1,}}(/weight)?|/weight)"
        rf"|(*_)?(vocab(ulary)?|tok|lookup|lut|words?){COUNTER}{_NUMBERS}(/(weight|table))?"
        r"|^((params|model|transformer|encoder|decoder)/){0,}(shared/weight|tied*(/weight)?)",
        "embedding",
        condition=near.has_no_bias,
    ),
    # "norm_proj/kernel" is a matrix; "norm/kernel" is the scale in EasyDeL, "norm/w" in tunix.
    adamw(rf"(?i)(*norm|ln|rms)(_*|\d+)?(/(?!kernel$|w$)*)?|*norm{_KERNEL}", "norm"),
    # "pre_logits" is the hidden layer before the head of a ViT.
    adamw(
        rf"(?i)(?!pre_)((?!multi)(*_)?(head|logits?|unembed|readout)(_dense)?{COUNTER}"
        r"|^((params|model|transformer)/){0,}outputs?|(*_)?classifier|to_logit|qa_outputs"
        r"|logits?_?(dense|proj(ection)?)|vocab_proj(ector|ection)?"
        rf"|seq_relationship|dense_prediction|(predictions|lm_head)/decoder){_OWN}",
        "head",
    ),
    adamw(
        rf"{TOP}(output_layer|output_proj(ection)?|score){_OWN}"
        rf"|^(?!**(att|mha|multi|layers|block))(**/)?(*_)?heads/*{LEAF}",
        "head",
        condition=near.is_outermost,
    ),
    adamw(
        rf"(?i)((?!pos_proj/)(pos(ition(s|al)?)?(_*)?|*_pos(ition)?)"
        rf"|(rel|relative)_*(pos|bias|table)*){_NUMBERS}{_OWN}",
        "position table",
    ),
    adamw(
        rf"(?i)(cls|probe|latents|codebooks?|codevectors|(*_)?(tokens?|tables?)){COUNTER}"
        rf"{_NUMBERS}(/weight)?",
        "table of vectors",
        condition=near.has_no_bias,
    ),
    adamw(
        r"(?i)((*_)?(alpha|tau|temperature|sinks?)|r_k|time_(decay|first|faaaa|(mix|maa)_[a-z]))"
        + COUNTER,
        "stacked vectors",
    ),
    adamw("(?i)delta|omega|damping*|decay*|ema_*", "stacked vectors", "width, state, 1"),  # Mega
    # State-space models: S4, S5, the LRU, Mamba.
    adamw(
        rf"(?i)log_(?!*(proj|weight|kernel))*|*_log|(*_)?dt|time_?(step|scale|constant)s?|step_sizes?|(*_)?decay(_rate)?s?"
        rf"|lambda|inv_{_DECAY}"
        rf"|((log|inv)_)?{_DECAY}(_(log|re(al)?|im(ag)?)){{1,}}" + COUNTER,
        "step size or decay rate",
    ),
    adamw(f"(?i)*(depthwise|dw_?conv|conv_?dw)*{_OWN}", "depthwise"),
    # (width, channels) of Griffin's temporal convolution; (.., width, 1, channels) elsewhere.
    adamw(f"{_CONV}1d{_KERNEL}", "depthwise", "width, channels"),
    adamw("(?i)*conv1d_kernel", "depthwise", "channels, width", "Keras"),
    *(adamw(_CONV + _KERNEL, _ONE, f"{x}, 1, channels") for x in ("width", "height, width")),
    *(adamw(f"{_CONV}/weight", _ONE, f"channels, 1, {x}", _TORCH) for x in ("w", "h, w")),
    matrix("kernel|w|pointwise_kernel", "convolution: (1 1 in), out", _ANY),
    matrix("*/weight", "convolution: out, (in 1 1)", _TORCH),
    *(matrix(_WINDOW, f"convolution: ({x} in), out", _FLAX, near.is_one_kernel) for x in _SIDES),
    # Stacked kernels (layers, in, out) have three axes too: the conditions compare the heads.
    matrix("(query|key|value)/kernel", "attention: in, (heads head)", _FLAX, near.heads_may_match),
    matrix("out/kernel", "attention: (heads head), out", "Flax", near.heads_may_match),
    matrix(attention.QKV + _KERNEL, "attention: in, (heads head)", _TUNIX, near.heads_match),
    matrix(attention.OUT + _KERNEL, "attention: (heads head), out", _TUNIX, near.heads_match),
    matrix("q_einsum" + _KERNEL, "attention: heads, in, head", "Gemma"),
    matrix("q?kv_einsum" + _KERNEL, "attention: part, heads, in, head", "Gemma"),
    matrix("attn_vec_einsum" + _KERNEL, "attention: (heads head), out", "Gemma"),
    # A shared expert is a single layer. The condition excludes (in, layers, out).
    matrix(f"(?i)(?!**shared){_EXPERT}", "experts: expert, in, out", "Flax", near.are_many),
    matrix(
        r"weight(_v|_orig)?|weight_[ih][hr](_l\d+)?(_reverse)?|(in|[qkv])_proj_weight"
        "|parametrizations/*/original1",
        *_WEIGHT,
    ),
    matrix("(*_)?kernel", "kernel: in, out", _FLAX),
    matrix("*/w", "w: in, out", "Haiku, tunix"),
    matrix("**", "by default: in, out"),
    matrix("**", "by its bias: out, in"),
)
