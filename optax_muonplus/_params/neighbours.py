"""Questions about the names and shapes beside a parameter, in its own module.

Each function gets the shapes by their paths below the module, as in
``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``, and the path of the parameter in
question. What ``optax.masked`` or Equinox left out is there too, with the shape ``()``.
"""

import functools
import re
from collections.abc import Mapping

from optax_muonplus._leaves.layout import Shape

Neighbours = Mapping[str, Shape]

_QUERY = r"((q|query)(_proj|_projection)?|wq|wq_b)"
OUT = r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)"
# Layers beside which an output or a value is one of attention, or of another inner module.
INNER = (
    r"((w|to)?_?([qk]|qkv|kv|quer(y|ies)|keys?|query_key_value|key_value|gate_up|gate|up|down)"
    r"(_?(proj(ection)?|layer|linear|dense|lin|attn))?|c_attn|in_proj_weight)"
)
_WIDEST = 11  # AlexNet's window is the widest one with a long side; what is longer may be layers
_FEW = 4  # a depthwise kernel is so wide, so that as many inputs may be the width of one
# Shorter sides, and sides in a larger ratio, are rare: 6 wrong readings and 3 layers of 14 models.
SHORT, RATIO = 16, 36


def heads_match(module: Neighbours, _path: str, unknown: bool = False) -> bool:
    """Whether queries (in, heads, head) and outputs (heads, head, out) have as many heads.

    Stacked kernels have not: queries are (layers, in, out) then, and outputs begin with layers.
    ``unknown`` is the answer where one of them is not there to compare.
    """
    kernels = [(name, shape) for name, shape in module.items() if len(shape) == 3]
    queries, outputs = (
        {shape[axis] for name, shape in kernels if re.fullmatch(f"{names}/(kernel|w)", name)}
        for names, axis in ((_QUERY, 1), (OUT, 0))
    )
    return queries == outputs if queries and outputs else unknown


heads_may_match = functools.partial(heads_match, unknown=True)


def has_no_bias(module: Neighbours, path: str) -> bool:
    """Whether there is no bias beside a weight: a table of vectors never has one."""
    layer = path.rpartition("/")[0]
    return not {f"{layer}/bias", f"{layer}/b"} & module.keys()


def is_table(module: Neighbours, path: str) -> bool:
    """Whether a weight has no bias beside it, or is for no more than a few features."""
    is_weight = re.search(r"(^|/)(kernel|w|weight)$", path)
    return not is_weight or has_no_bias(module, path) or min(module[path]) <= SHORT


def is_bias(module: Neighbours, path: str) -> bool:
    """Whether its matrices, named with w for b or at the place before it, have one axis more."""
    bias = module[path]
    before = re.sub(r"\d+$", lambda number: str(int(number[0]) - 1), path)
    name = re.sub("(?i)(^|/|_)(bias(es)?|b)", r"(\1(\2|w|weights?|kernels?))?", re.escape(path))
    named = {x for other, x in module.items() if re.fullmatch(name, other, re.I)}
    shapes = {*named, module.get(before, ())}
    shorter = {(*x[:axis], *x[axis + 1 :]) for x in shapes for axis in range(len(x))}
    return len(bias) > 1 and (bias in shorter or () in named)  # of those left out names are known


def is_plausible(batch: int, rows: int, columns: int, too_short: int = 0) -> bool:
    """Whether sides and number are those of layers, and not of a batch along a wrong axis."""
    short, long = sorted((rows, columns))
    return short > too_short and long < RATIO * short and batch <= 2 * long


def are_many(module: Neighbours, path: str) -> bool:
    """Whether the first axis may number matrices."""
    return is_plausible(*module[path])


def is_outermost(module: Neighbours, path: str) -> bool:
    """Whether no layer beside it has a name by which both are of attention or of a gate."""
    layer = path.split("/")[0]
    # Layers with a leaf each, or leaves of one holder.
    parts = [name.split("/") for name in module if name != path]
    names = {name[-1] if name[0] == layer else name[0] for name in parts}
    return not any(re.fullmatch(INNER, name, re.I) for name in names)


def is_one_kernel(module: Neighbours, path: str) -> bool:
    """Whether a shape is that of a window, and not of stacked layers with smaller windows.

    Flax and Keras store (window, inputs of one group, outputs). The sides of a window are equal, or
    1: (3, 3), (1, 7), (1, 3, 3). A shape with one side and few inputs, as (12, 4, 1024), may be 12
    depthwise kernels. The inputs of one group only are no matrix.
    """
    *window, inputs, _ = module[path]
    if len(window) == 1:
        fits = window[0] <= max(inputs, _WIDEST) and not 1 < inputs <= _FEW
    else:
        sides = {side for side in window if side > 1}
        fits = len(sides) == 1 and (1 not in window or max(sides) <= _WIDEST)
    return fits and not _is_grouped(module, path)


def _is_grouped(module: Neighbours, path: str) -> bool:
    """Whether the layer just before has several times as many outputs as a kernel has inputs.

    Two branches may have one input: the layer before has other inputs than this one.
    """
    *_, inputs, outputs = module[path]
    name = re.sub(r"\d+(?=\D*$)", lambda number: str(int(number[0]) - 1), path)
    unnumbered = name.replace("_0/", "/")  # Keras gives its first layer no number
    *_, others, before = module.get(name) or module.get(unnumbered) or (1, 1)
    groups = before // inputs
    return groups > 1 < inputs != others and before % inputs == 0 and outputs % groups == 0


def bias_of(module: Neighbours, path: str) -> Shape:
    """The axes of the bias of a layer with one matrix; ``()`` if there is none.

    Beside several matrices a bias may be that of another one. Equinox adds axes of length 1.
    """
    layer = path.rpartition("/")[0]
    own = [f"{layer}/{name}".lstrip("/") for name in ("bias", "b")]
    bias = next((module[name] for name in own if module.get(name)), ())
    # Most leaves have none, and do not look at all others.
    has_others = bias and any(
        name.rpartition("/")[0] == layer and sum(n > 1 for n in shape) > 1
        for name, shape in module.items()
        if name not in (*own, path)
    )
    return () if has_others else tuple(size for size in bias if size > 1)
