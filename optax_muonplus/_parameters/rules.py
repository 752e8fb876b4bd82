"""The default rules as a table: which parameters are matrices, and how they lie.

The first rule that fits a parameter is taken. A rule is written in words:

- **Names** are a regular expression for whole names at the end of a path. ``*`` stands for any part
  of one name and ``**`` for any part of the path; after a leading ``(?i)`` case does not matter.
  ``"(?i)*expert*/kernel"`` fits ``layers/0/Experts_1/kernel``.
- **What it is**, and for a matrix a colon and its axes in order: ``"attention: in, (heads head)"``.
  ``in`` and ``out`` are the inputs and outputs of the layer; all axes in one pair of parentheses
  are on one side. ``heads``, ``head``, ``rank`` and other parentheses are on the side that is not
  named; if none is named, the first of them are the inputs. Any other axis, as ``expert``, numbers
  matrices. A number is an axis of that size, and axes of one name have one size.
- **Libraries** with this convention; none, if all have it in common.
- **Neighbours** may be asked too: shapes in the same module by their paths below it, as in
  ``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from optax_muonplus._parameters.convolutions import is_first, is_one_kernel
from optax_muonplus._parameters.matrix_view import DimensionNumbers, MuonDimensionNumbers, Shape

Neighbours = Mapping[str, Shape]
Agrees = Callable[[Neighbours, str], bool]


class Rule(NamedTuple):
    """What parameters are that fit a pattern."""

    pattern: str  # regular expression, searched in the path "blocks/0/attn/query/kernel"
    dimension_numbers: DimensionNumbers | None  # None for the AdamW group
    ndim: int | None = None  # number of axes that the rule is for; None means any
    reads: str = ""  # what the rule takes the parameter for, as describe shows it
    axes: Sequence[str] = ()  # their names; numbers and repeated names restrict the shape
    agrees: Agrees | None = None  # whether the neighbours allow this reading of the one at a path

    def fits(self, name: str, shape: Shape) -> bool:
        """Whether path and shape fit, without a look at the neighbours."""
        # A vector is no matrix, whatever its path; a rule without ndim may only confirm that.
        right_ndim = len(shape) == self.ndim
        if self.ndim is None:
            right_ndim = self.dimension_numbers is None or len(shape) >= 2
        sizes: dict[str, int] = {}
        right_sizes = right_ndim and all(
            size == (int(axis) if axis.isdigit() else sizes.setdefault(axis, size))
            for axis, size in zip(self.axes, shape, strict=bool(self.axes))
        )
        return right_sizes and re.search(self.pattern, name) is not None


def matrix(names: str, reads: str, library: str = "", agrees: Agrees | None = None) -> Rule:
    """Makes a rule for matrices that lie as ``reads`` says."""
    groups = _groups(reads.partition(": ")[2])
    axes = [axis for group in groups for axis in group]
    numbers = MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in _sides(groups, reads)))
    return Rule(_pattern(names), numbers, len(axes), _shown(reads, library), axes, agrees)


def adamw(names: str, reads: str, axes: str = "", library: str = "") -> Rule:
    """Makes a rule for parameters that are not matrices."""
    found = [axis for group in _groups(axes) for axis in group] if axes else []
    return Rule(_pattern(names), None, len(found) or None, _shown(reads, library), found)


def _shown(reads: str, library: str) -> str:
    return f"{reads} ({library})" if library else reads


def _pattern(names: str) -> str:
    flags = "(?i)" if names.startswith("(?i)") else ""
    names = re.sub(r"\*\*?", lambda x: "[^/]*" if x[0] == "*" else ".*", names[len(flags) :])
    return rf"{flags}(^|/)({names})$"


def _groups(layout: str) -> list[list[str]]:
    """The names between commas: several in parentheses, or one."""
    items = layout.split(", ")
    wrong = [item for item in items if not re.fullmatch(r"\w+|\(\w+( \w+)+\)", item)]
    if wrong:
        raise ValueError(
            f"The layout {layout!r} has {wrong[0]!r} where one axis, or several in parentheses, are"
            " expected, as in 'in, (heads head)'."
        )
    return [item.strip("()").split() for item in items]


def _sides(groups: Sequence[Sequence[str]], reads: str) -> tuple[Shape, Shape]:
    """The axes of the inputs and of the outputs."""
    named: dict[str, Shape] = {}
    others: list[Shape] = []
    start = 0
    for group in groups:
        axes = tuple(range(start, start := start + len(group)))
        sides = [axis for axis in group if axis in ("in", "out")]
        if len(sides) > 1 or named.keys() & sides:
            raise ValueError(f"{reads!r} names a side twice, or two of them in one place.")
        if sides:
            named[sides[0]] = axes
        elif len(group) > 1 or group[0] in ("heads", "head", "rank"):
            others.append(axes)
    if not named and others:
        named["in"] = others.pop(0)
    if len(named) + bool(others) != 2:
        raise ValueError(
            f"{reads!r} does not say which axes are inputs and which are outputs: name them in and"
            " out. Heads, a rank and parentheses stand for the one side that is not named."
        )
    rest = sum(others, ())
    return named.get("in", rest), named.get("out", rest)


_QKV = r"(([qkv]|query|key|value)(_proj|_projection)?|w[qkv]|wq_b|wkv_b)"
_OUT = r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)"
_QUERY = r"((q|query)(_proj|_projection)?|wq|wq_b)"


def heads_match(module: Neighbours, _own: str, unknown: bool = False) -> bool:
    """Whether queries (in, heads, head) and outputs (heads, head, out) have as many heads.

    Stacked kernels have not: queries are (layers, in, out) then, and outputs begin with layers.
    ``unknown`` is the answer where one of them is not there to compare.
    """
    queries, outputs = (
        {
            shape[axis]
            for name, shape in module.items()
            if len(shape) == 3 and re.fullmatch(f"{names}/(kernel|w)", name)
        }
        for names, axis in ((_QUERY, 1), (_OUT, 0))
    )
    return queries == outputs if queries and outputs else unknown


heads_may_match = functools.partial(heads_match, unknown=True)


def gpt2_of_transformers(module: Neighbours, _own: str) -> bool:
    """Whether ``c_attn`` or ``c_fc``, with more outputs than inputs, lie as in ``FlaxGPT2Model``.

    It stores (out, in), and nanoGPT in Flax (in, out) under the same names.
    """
    known = (module.get("c_attn/kernel", ()), module.get("c_fc/kernel", ()))
    return any(len(shape) == 2 and shape[0] > shape[1] for shape in known)


def other_adapter_is_a_matrix(module: Neighbours, own: str) -> bool:
    """Whether the other one of ``lora_a`` and ``lora_b`` has two axes, so that this one has heads.

    Qwix makes them for ``einsum``. Layers and experts would be axes of both.
    """
    # The rank is the last axis of lora_a and the first of lora_b.
    name, other, rank = ("lora_a", "lora_b", -1) if "lora_a" in own else ("lora_b", "lora_a", 0)
    shape = module.get(own.replace(name, other), ())
    return len(shape) == 2 and shape[-1 - rank] == module[own][rank]


_KERNEL = "/(kernel|w)"  # of Flax and Keras; of Haiku
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
_TOP = r"(?i)^(?!(**/)?*(\d|layers|blocks|att|mlp|ffn|feed|moe|expert|cell)*/)(**/)?"

DEFAULT_RULES: tuple[Rule, ...] = (
    adamw(r"(?i)(*_)?(bias|scale|offset|gain|gamma|beta)" + _COUNTER, "bias or scale"),
    adamw("*/b", "bias", library="Haiku"),  # it has a module above it
    # Patches have "embed" in their names, and are matrices nevertheless.
    matrix(_PATCH + _KERNEL, "patches: (side side in), out", _ANY),
    matrix(_PATCH + "/weight", "patches: out, (in side side)", _TORCH),
    matrix("(?i)*patch*" + _KERNEL, "patches: in, out", _FLAX),
    matrix("(?i)*patch*/weight", "patches: out, in", _TORCH),
    adamw(rf"(?i)(*embed*|(*_)?emb(_*|\d+)?|w[tp]e){_OWN}", "embedding"),
    # A norm has no kernel: "norm_proj/kernel" is a matrix.
    adamw(r"(?i)(*norm|ln|rms)(_*|\d+)?(/(?!kernel$|w$)*)?", "norm"),
    # Unless nothing but its scale is meant: tunix calls that w, EasyDeL kernel.
    adamw("(?i)*norm" + _KERNEL, "norm"),
    adamw(rf"(?i)(?!multi)(*_)?(head|logits|unembed|readout)(_dense)?{_COUNTER}{_OWN}", "head"),
    adamw(rf"(?i)^((params|model|transformer)/){{0,}}outputs?{_OWN}", "head"),
    adamw(
        r"(?i)(logit_?(dense|proj(ection)?)|logits_?proj(ection)?|to_logit|(*_)?classifier"
        r"|vocab_proj(ector|ection)?|qa_outputs|seq_relationship|dense_prediction"
        rf"|(predictions|lm_head)/decoder){_OWN}",
        "head",
    ),
    adamw(rf"{_TOP}(output_layer|output_proj(ection)?|score){_OWN}", "head"),
    adamw(rf"(?i)(pos(ition(s|al)?)?(_*)?|*_pos(ition)?){_OWN}", "position table"),
    adamw(rf"(?i)(rel|relative)_*(pos|bias|table)*{_OWN}", "position table"),
    adamw(
        rf"(?i)(cls|probe|latents|codebooks?|codevectors|(*_)?(tokens?|tables?)){_COUNTER}",
        "table of vectors",
    ),
    adamw(
        r"(?i)((*_)?(alpha|dt|tau|temperature|sinks?)|a_(log|real|imag)(_real|_imag)?|log_dt"
        r"|lambda_(re|im|log)|(nu|theta|gamma)_log|time_(decay|first|faaaa|(mix|maa)_[a-z]))"
        + _COUNTER,
        "stacked vectors",
    ),
    adamw(f"(?i)shared_expert_gate{_OWN}", "gate of one output"),
    adamw(f"(?i)*(depthwise|dw_?conv|conv_?dw)*{_OWN}", "depthwise"),
    *(matrix(_FIRST, f"convolution: ({x} 1), out", _FLAX, is_first) for x in _SIDES),
    # (width, channels) of Griffin's temporal convolution; (.., width, 1, channels) elsewhere.
    adamw(f"{_CONV}1d{_KERNEL}", "depthwise", "width, channels"),
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
    matrix("*lora_a", "LoRA: (heads head), rank", "Qwix", other_adapter_is_a_matrix),
    matrix("*lora_b", "LoRA: rank, (heads head)", "Qwix", other_adapter_is_a_matrix),
    # Equinox and PyTorch name it so and store it as (out, in). So do Haliax's linear layers.
    matrix("weight", "weight: out, in", "Equinox, PyTorch, Haliax"),
    matrix(r"weight_[ih]h(_l\d+)?|in_proj_weight", "weight: out, in", _TORCH),
    matrix("(*_)?kernel", "kernel: in, out", _FLAX),
    matrix("*/w", "w: in, out", "Haiku, tunix"),
    matrix("**", "by default: in, out"),
)
