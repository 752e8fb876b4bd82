"""Whether the shapes of neighbouring parameters allow a reading that a name alone leaves open.

Each function takes the shapes of a module's parameters by their paths below it, as in
``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``, and the path of the one to be read.
"""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]

_QUERY = re.compile(r"(q|query)(_proj|_projection)?/(kernel|w)|wq(_b)?/(kernel|w)")
_OUTPUT = re.compile(r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)/(kernel|w)")


def heads_match_output(module: Shapes, own: str) -> bool:
    """Whether queries (in, heads, head) and outputs (heads, head, out) have as many heads.

    Stacked kernels have not: queries are (layers, in, out) then, and outputs begin with layers.
    """
    del own
    queries, outputs = _of_three_axes(module, _QUERY), _of_three_axes(module, _OUTPUT)
    return bool(queries and outputs) and {q[1] for q in queries} == {o[0] for o in outputs}


def heads_do_not_disagree(module: Shapes, own: str) -> bool:
    """As :func:`heads_match_output`, and true where one of the two is not there to compare."""
    queries, outputs = _of_three_axes(module, _QUERY), _of_three_axes(module, _OUTPUT)
    return not (queries and outputs) or heads_match_output(module, own)


def flax_gpt2_kernels(module: Shapes, own: str) -> bool:
    """Whether ``c_attn`` or ``c_fc``, which have more outputs than inputs, lie as (out, in).

    ``FlaxGPT2Model`` of Hugging Face Transformers stores them so, nanoGPT in Flax does not.
    """
    del own
    known = (module.get("c_attn/kernel"), module.get("c_fc/kernel"))
    return any(shape[0] > shape[1] for shape in known if shape is not None and len(shape) == 2)


def other_adapter_is_a_matrix(module: Shapes, own: str) -> bool:
    """Whether the other one of ``lora_a`` (in, rank) and ``lora_b`` (rank, out) has two axes.

    Then the further axes of this one are heads: layers and experts would be axes of both. Qwix
    makes them (heads, head, rank) and (rank, heads, head) for ``einsum``.
    """
    shape = module[own]
    a_is_own = "lora_a" in own
    other = module.get(own.replace(*(("lora_a", "lora_b") if a_is_own else ("lora_b", "lora_a"))))
    if other is None or len(other) != 2:
        return False
    return shape[-1] == other[0] if a_is_own else shape[0] == other[-1]


def _of_three_axes(module: Shapes, pattern: re.Pattern[str]) -> list[tuple[int, ...]]:
    return [s for path, s in module.items() if len(s) == 3 and pattern.fullmatch(path)]
