"""Whether the shapes of neighbouring parameters allow a reading that a name alone leaves open.

Each function takes the shapes of a module's parameters by their paths below it, as in
``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``.
"""

import re
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]

_QUERY = re.compile(r"(q|query)(_proj|_projection)?/(kernel|w)|wq(_b)?/(kernel|w)")
_OUTPUT = re.compile(r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)/(kernel|w)")


def heads_match_output(module: Shapes) -> bool:
    """Whether queries (in, heads, head) and outputs (heads, head, out) have as many heads.

    Stacked kernels have not: queries are (layers, in, out) then, and outputs begin with layers.
    """
    queries, outputs = _of_three_axes(module, _QUERY), _of_three_axes(module, _OUTPUT)
    return bool(queries and outputs) and {q[1] for q in queries} == {o[0] for o in outputs}


def heads_do_not_disagree(module: Shapes) -> bool:
    """As :func:`heads_match_output`, and true where one of the two is not there to compare."""
    queries, outputs = _of_three_axes(module, _QUERY), _of_three_axes(module, _OUTPUT)
    return not (queries and outputs) or heads_match_output(module)


def flax_gpt2_kernels(module: Shapes) -> bool:
    """Whether ``c_attn`` or ``c_fc``, which have more outputs than inputs, lie as (out, in).

    ``FlaxGPT2Model`` of Hugging Face Transformers stores them so, nanoGPT in Flax does not.
    """
    known = (module.get("c_attn/kernel"), module.get("c_fc/kernel"))
    return any(shape[0] > shape[1] for shape in known if shape is not None and len(shape) == 2)


def _of_three_axes(module: Shapes, pattern: re.Pattern[str]) -> list[tuple[int, ...]]:
    return [s for path, s in module.items() if len(s) == 3 and pattern.fullmatch(path)]
