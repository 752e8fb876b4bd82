"""What the neighbours of a parameter say about it: the names and shapes in its own module.

Each function gets the shapes by their paths below the module, as in
``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``, and the path of the parameter that
is asked about. What ``optax.masked`` or Equinox left out is there too, with the shape ``()``.
"""

import functools
import re
from collections.abc import Mapping

from optax_muonplus.frame import Shape

Neighbours = Mapping[str, Shape]

_QUERY = r"((q|query)(_proj|_projection)?|wq|wq_b)"
_OUT = r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)"
# Layers beside which an output or a value is one of attention, or of another inner module.
_INNER = (
    r"(?i)((w|to)?_?([qk]|qkv|kv|quer(y|ies)|keys?|query_key_value|key_value|gate|up|down)"
    r"(_?(proj(ection)?|layer|linear|dense|lin|attn))?|c_attn|in_proj_weight)"
)


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


def has_no_bias(module: Neighbours, own: str) -> bool:
    """Whether there is no bias beside a weight: a table of vectors never has one."""
    layer = own.rpartition("/")[0]
    return not {f"{layer}/bias", f"{layer}/b"} & module.keys()


def is_outermost(module: Neighbours, own: str) -> bool:
    """Whether no layer is beside it by whose name both belong to attention or a gated layer."""
    layer = own.split("/")[0]
    # Layers with a leaf each, or leaves of one holder.
    parts = [name.split("/") for name in module if name != own]
    names = {name[-1] if name[0] == layer else name[0] for name in parts}
    return not any(re.fullmatch(_INNER, name) for name in names)


def is_last(module: Neighbours, own: str) -> bool:
    """Whether no layer in the module takes its outputs: none of a higher number or other name.

    Layers that were left out of the tree may take them, so that their names count alone. One with
    as many outputs as inputs is a hidden layer, whose taker is elsewhere.
    """
    name, _, leaf = own.rpartition("/")
    out, into = (0, 1) if leaf == "weight" else (-1, -2)
    if module[own][out] == module[own][into]:
        return False
    stem, number = _numbered(name)
    for other, shape in module.items():
        others, _, other_leaf = other.rpartition("/")
        other_stem, other_number = _numbered(others)
        if other == own or other_leaf != leaf or (other_stem == stem and other_number < number):
            continue
        if other_stem == stem or len(shape) < 2 or shape[into] == module[own][out]:
            return False
    return True


def _numbered(name: str) -> tuple[str, int]:
    """A name without its last number, and the number: -1 where there is none."""
    found = re.fullmatch(r"(.*?)(\d*)", name)
    assert found is not None
    return found[1], int(found[2] or -1)
