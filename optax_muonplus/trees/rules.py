"""The default rules as a table: which parameters are matrices, and how they lie.

The first rule that fits a parameter is taken; ``rule_words.py`` explains how they are written.
"""

from optax_muonplus.trees.neighbours import (
    ends_as_w,
    gpt2_of_transformers,
    has_no_bias,
    heads_match,
    heads_may_match,
    is_first,
    is_last,
    is_one_kernel,
    is_outermost,
    outputs_are_first,
    outputs_are_last,
)
from optax_muonplus.trees.rule_words import PathRule, adamw, matrix

_QKV = r"(([qkv]|query|key|value)(_proj|_projection)?|w[qkv]|wq_b|wkv_b)"
_OUT = r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)"
_KERNEL = "/(kernel|w)"  # Flax and Keras have kernels, Haiku a w
_FLAX, _ANY = "Flax, Keras", "Flax, Keras, Haiku"
_TUNIX = "MaxText, tunix, Keras"
_TORCH = "Equinox, PyTorch"
_OWN = "(/*)?"  # also where the names are those of the module that owns the parameter
_COUNTER = r"(_?\d+)?"
_PATCH = r"(?i)(*(embed|patch)*|stem)(/proj(ection)?|/conv)?"
_CONV = "(?i)*conv*"
# Not where layers may be stacked. Transposed ones of Keras have outputs before inputs.
_STACK = r"(**/)?(layers|blocks|stages|stack*|scan*|h)/(?!\d)"
_WINDOW = f"(?i)^(?!{_STACK}|**_transpose)(**/)?*conv*/kernel"
_FIRST = f"(?i)^(?!{_STACK}|**(_transpose|depthwise|dw|separable))(**/)?*conv*/kernel"
_SIDES = ("width", "height width", "depth height width")
_MOE = r"(?i)(moe_?block(_\d+)?|routed_experts|gptossmlp)"
_GPT2 = "(c_attn|c_fc|c_proj|q_attn)/kernel"
# Not in a part of the network that is repeated or has outputs of its own.
_TOP = (
    r"(?i)^(?!(**/)?*(\d|layers|block|att|mha|multi_?head|self|cross|mlp|ffn|feed|moe|expert|cell"
    r"|mixer|ssm|mamba|rnn|lstm|gru)*/)(**/)?"
)
_LEAF = "(/(kernel|w|weight))?"
_NUMBERS = r"(/\d+){0,}"  # in lists
_EMBED = r"(*embed*|(*_)?emb(_*|\d+)?|w[tp]e)"
# What is within an embedding and is a layer by its name, which no table is.
_LAYER = r"(*(proj(ection)?|dense|linear|mlp|conv|att|norm|layer|ffn|fc)*|lin|in|out|up|down|gate)/"
_OF_AGENT = "head of an actor or critic"
# Networks of reinforcement learning, what they are made of, and what their outputs are called.
_NET = r"(_?(net(work)?|function|fn|mlp|model|params|head))"
_ROLE = "(actor|critic|policy|advantage)"
_AGENT = (
    rf"^(?!**(att|extractor))(**/)?((*_)?{_ROLE}{_NET}?|action{_NET}|value{_NET}?|pi|[qv]f"
    rf"|[qv]({_NET}|_?\d)){_COUNTER}"
    r"(/(~|params|mlp|net(work)?|layers|body|trunk|torso)){0,}"
)
_GIVES = (
    r"(out(put)?s?|logits?|means?|mu|loc|log_?std|values?|final|last)"
    r"(_(layer|linear|dense|fc|proj))?"
)

DEFAULT_RULES: tuple[PathRule, ...] = (
    adamw(r"(?i)(*_)?(bias|scale|offset|gain|gamma|beta)" + _COUNTER, "bias or scale"),
    matrix("(?i)*lora*/a", "LoRA: in, rank", "Gemma"),
    matrix("(?i)*lora*/b", "LoRA: rank, out", "Gemma"),
    matrix("(?i)*lora*/b", "LoRA: rank, (heads out)", "Gemma"),
    adamw("*/b", "bias", library="Haiku"),  # it has a module above it
    adamw("*/*_b", "bias", library="Haiku", agrees=ends_as_w),
    # Patches have "embed" in their names, and are matrices nevertheless.
    matrix(_PATCH + _KERNEL, "patches: (side side in), out", _ANY),
    matrix(_PATCH + "/weight", "patches: out, (in side side)", _TORCH),
    matrix("(?i)*patch*" + _KERNEL, "patches: in, out", _FLAX),
    matrix("(?i)*patch*/weight", "patches: out, in", _TORCH),
    matrix(f"(?i)*emb(ed(ding)?)?_proj(ection)?{_KERNEL}", "kernel: in, out", _ANY),
    adamw(rf"(?i){_EMBED}{_OWN}", "embedding"),
    # In lists and dicts. Networks of times are called so too, and have biases.
    adamw(rf"(?i)(?!*time){_EMBED}(/\d+){{1,}}(/weight)?", "embedding", agrees=has_no_bias),
    adamw(
        rf"(?i)(?!*time|*patch){_EMBED}{_NUMBERS}/(?!{_LAYER})*((/\d+){{1,}}(/weight)?|/weight)",
        "embedding",
        agrees=has_no_bias,
    ),
    adamw(
        rf"(?i)(*_)?(vocab(ulary)?|tok|lookup|lut|words?){_COUNTER}{_NUMBERS}(/(weight|table))?",
        "embedding",
        agrees=has_no_bias,
    ),
    adamw(
        r"(?i)^((params|model|transformer|encoder|decoder)/){0,}(shared/weight|tied*(/weight)?)",
        "embedding",
        agrees=has_no_bias,
    ),
    # A norm has no kernel: "norm_proj/kernel" is a matrix.
    adamw(r"(?i)(*norm|ln|rms)(_*|\d+)?(/(?!kernel$|w$)*)?", "norm"),
    # Unless nothing but its scale is meant: tunix calls that w, EasyDeL kernel.
    adamw("(?i)*norm" + _KERNEL, "norm"),
    # "pre_logits" is the hidden layer before the head of a ViT.
    adamw(
        rf"(?i)(?!multi|pre_)(*_)?(head|logits?|unembed|readout)(_dense)?{_COUNTER}{_OWN}", "head"
    ),
    adamw(rf"(?i)^((params|model|transformer)/){{0,}}outputs?{_OWN}", "head"),
    adamw(
        r"(?i)(?!pre_)(logit_?(dense|proj(ection)?)|logits_?proj(ection)?|to_logit|(*_)?classifier"
        r"|vocab_proj(ector|ection)?|qa_outputs|seq_relationship|dense_prediction"
        rf"|(predictions|lm_head)/decoder){_OWN}",
        "head",
    ),
    adamw(rf"{_TOP}(output_layer|output_proj(ection)?|score){_OWN}", "head", agrees=is_outermost),
    adamw(
        rf"(?i)^(?!**(att|mha|multi|layers|block))(**/)?(*_)?heads/*{_LEAF}",
        "head",
        agrees=is_outermost,
    ),
    # Actors and critics end in a layer of that name, in an output, or in the last of several.
    adamw(
        rf"(?i)((*_)?{_ROLE}{_NET}?|(value|action|[qv]f?){_NET}|v_head/summary){_COUNTER}{_LEAF}",
        _OF_AGENT,
        agrees=is_outermost,
    ),
    adamw(
        rf"(?i)(*_)?({_ROLE}|value|action|reward|[qv]f?)_?{_GIVES}{_COUNTER}{_LEAF}",
        _OF_AGENT,
        agrees=is_outermost,
    ),
    adamw(rf"{_TOP}(value|advantage){_COUNTER}/(kernel|w|weight)", _OF_AGENT, agrees=is_outermost),
    adamw(rf"(?i){_AGENT}/{_GIVES}{_LEAF}", _OF_AGENT, agrees=is_outermost),
    adamw(rf"(?i){_AGENT}/[a-z]{{0,}}_?\d+/(kernel|w|weight)", _OF_AGENT, "a, b", "", is_last),
    adamw(rf"(?i)(*_)?log_?std(_*)?{_LEAF}", _OF_AGENT),
    adamw(
        rf"(?i)(?!pos_proj/)(pos(ition(s|al)?)?(_*)?|*_pos(ition)?){_NUMBERS}{_OWN}",
        "position table",
    ),
    adamw(rf"(?i)(rel|relative)_*(pos|bias|table)*{_NUMBERS}{_OWN}", "position table"),
    adamw(
        rf"(?i)(cls|probe|latents|codebooks?|codevectors|(*_)?(tokens?|tables?)){_COUNTER}"
        rf"{_NUMBERS}(/weight)?",
        "table of vectors",
        agrees=has_no_bias,
    ),
    adamw(
        r"(?i)((*_)?(alpha|dt|tau|temperature|sinks?)|a_(log|real|imag)(_real|_imag)?|log_dt|r_k"
        r"|lambda_(re|im|log)|(nu|theta|gamma)_log|time_(decay|first|faaaa|(mix|maa)_[a-z]))"
        + _COUNTER,
        "stacked vectors",
    ),
    adamw(f"(?i)shared_expert_gate{_OWN}", "gate of one output"),
    adamw(f"(?i)*(depthwise|dw_?conv|conv_?dw)*{_OWN}", "depthwise"),
    *(matrix(_FIRST, f"convolution: ({x} 1), out", _FLAX, is_first) for x in _SIDES),
    # (width, channels) of Griffin's temporal convolution; (.., width, 1, channels) elsewhere.
    adamw(f"{_CONV}1d{_KERNEL}", "depthwise", "width, channels"),
    adamw("(?i)*conv1d_kernel", "depthwise", "channels, width", "Keras"),
    adamw(_CONV + _KERNEL, "depthwise or one channel", "width, 1, channels"),
    adamw(_CONV + _KERNEL, "depthwise or one channel", "height, width, 1, channels"),
    adamw(_CONV + "/weight", "depthwise or one channel", "channels, 1, width", _TORCH),
    adamw(_CONV + "/weight", "depthwise or one channel", "channels, 1, height, width", _TORCH),
    matrix("kernel|w|pointwise_kernel", "convolution: (1 1 in), out", _ANY),
    matrix("*/weight", "convolution: out, (in 1 1)", _TORCH),
    *(matrix(_WINDOW, f"convolution: ({x} in), out", _FLAX, is_one_kernel) for x in _SIDES),
    # Stacked kernels (layers, in, out) have as many axes as these: the neighbours tell.
    matrix("(query|key|value)/kernel", "attention: in, (heads head)", _FLAX, heads_may_match),
    matrix("out/kernel", "attention: (heads head), out", "Flax", heads_may_match),
    matrix(_QKV + _KERNEL, "attention: in, (heads head)", _TUNIX, heads_match),
    matrix(_OUT + _KERNEL, "attention: (heads head), out", _TUNIX, heads_match),
    matrix("q_einsum" + _KERNEL, "attention: heads, in, head", "Gemma"),
    matrix("q?kv_einsum" + _KERNEL, "attention: part, heads, in, head", "Gemma"),
    matrix("attn_vec_einsum" + _KERNEL, "attention: (heads head), out", "Gemma"),
    matrix("(?i)*expert*/(*/)?kernel", "experts: expert, in, out", "Flax"),
    matrix(_MOE + r"/(wi(_\d)?|wo)", "experts: expert, in, out", "MaxText"),
    matrix(_GPT2, "kernel: out, in", "GPT-2 of Transformers", gpt2_of_transformers),
    matrix("(?i)*lora_a(/w|/kernel)?", "LoRA: in, rank", "Flax, Qwix"),
    matrix("(?i)*lora_b(/w|/kernel)?", "LoRA: rank, out", "Flax, Qwix"),
    # A bias that is as long as one of two sides says which one the outputs are.
    matrix("weight", "weight, by its bias: in, out", agrees=outputs_are_last),
    matrix("kernel|w", "kernel, by its bias: out, in", agrees=outputs_are_first),
    # Equinox and PyTorch name it so and store it as (out, in). So do Haliax's linear layers.
    matrix("weight", "weight: out, in", "Equinox, PyTorch, Haliax"),
    matrix(r"weight_[ih]h(_l\d+)?|in_proj_weight", "weight: out, in", _TORCH),
    matrix("(*_)?kernel", "kernel: in, out", _FLAX),
    matrix("*/w", "w: in, out", "Haiku, tunix"),
    matrix("**", "by its bias: out, in", agrees=outputs_are_first),
    matrix("**", "by default: in, out"),
)
