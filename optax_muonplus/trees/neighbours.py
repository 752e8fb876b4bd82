"""What the neighbours of a parameter say about it: the names and shapes in its own module.

Each function gets the shapes by their paths below the module, as in
``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``, and the path of the parameter that
is asked about. What ``optax.masked`` or Equinox left out is there too, with the shape ``()``.
"""

import functools
import math
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
_WIDEST = 11  # AlexNet's window is the widest one with a long side; what is longer may be layers
_FEW = 4  # a depthwise kernel is so wide, so that as many inputs may be the width of one


def heads_match(module: Neighbours, _own: str, unknown: bool = False) -> bool:
    """Says whether queries (in, heads, head) and outputs (heads, head, out) have as many heads.

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
    """Says whether ``c_attn`` or ``c_fc`` has more outputs than inputs, as ``FlaxGPT2Model`` has.

    It stores (out, in), and nanoGPT in Flax (in, out) under the same names.
    """
    known = (module.get("c_attn/kernel", ()), module.get("c_fc/kernel", ()))
    return any(len(shape) == 2 and shape[0] > shape[1] for shape in known)


def outputs_are_first(module: Neighbours, own: str) -> bool:
    """Says whether the bias beside a matrix is as long as its first axis, and not as its last."""
    return _length_of_bias(module, own) == module[own][0] != module[own][-1]


def outputs_are_last(module: Neighbours, own: str) -> bool:
    """Says whether the bias beside a matrix is as long as its last axis, and not as its first."""
    return _length_of_bias(module, own) == module[own][-1] != module[own][0]


def _length_of_bias(module: Neighbours, own: str) -> int:
    """Returns the length of the one-axis bias of a layer of one matrix; -1 if it is no such layer.

    Beside several matrices a bias may be that of another one.
    """
    layer = own.rpartition("/")[0]
    biases = (module.get(f"{layer}/{name}".lstrip("/"), ()) for name in ("bias", "b"))
    length = next((shape[0] for shape in biases if len(shape) == 1), -1)
    if length < 0:  # so that most leaves do not look at all others
        return length
    matrices = (name for name, shape in module.items() if len(shape) > 1 and name != own)
    return -1 if any(name.rpartition("/")[0] == layer for name in matrices) else length


def ends_as_w(module: Neighbours, own: str) -> bool:
    """Says whether it has the last axes of the weight beside it, as ``gating_b`` of AlphaFold."""
    shape, weight = module[own], module.get(f"{own[:-2]}_w", ())
    return 0 < len(shape) < len(weight) and weight[-len(shape) :] == shape


def has_no_bias(module: Neighbours, own: str) -> bool:
    """Says whether there is no bias beside a weight: a table of vectors never has one."""
    layer = own.rpartition("/")[0]
    return not {f"{layer}/bias", f"{layer}/b"} & module.keys()


def is_outermost(module: Neighbours, own: str) -> bool:
    """Says whether no layer beside it has a name by which both are of attention or of a gate."""
    layer = own.split("/")[0]
    # Layers with a leaf each, or leaves of one holder.
    parts = [name.split("/") for name in module if name != own]
    names = {name[-1] if name[0] == layer else name[0] for name in parts}
    return not any(re.fullmatch(_INNER, name) for name in names)


def is_last(module: Neighbours, own: str) -> bool:
    """Says whether no layer of the module takes its outputs: none of a higher number or other name.

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


def is_one_kernel(module: Neighbours, own: str) -> bool:
    """Says whether a shape is that of a window, and not of stacked layers with smaller windows.

    Flax and Keras store (window, inputs of one group, outputs). The sides of a window are equal, or
    1: (3, 3), (1, 7), (1, 3, 3). A shape with one side and few inputs, as (12, 4, 1024), may be 12
    depthwise kernels. The inputs of one group only are no matrix.
    """
    *window, inputs, _ = module[own]
    if len(window) == 1:
        fits = window[0] <= max(inputs, _WIDEST) and not 1 < inputs <= _FEW
    else:
        sides = {side for side in window if side > 1}
        fits = len(sides) == 1 and (1 not in window or max(sides) <= _WIDEST)
    return fits and not _is_grouped(module, own)


def is_first(module: Neighbours, own: str) -> bool:
    """Says whether a kernel of one input is that of grey images, and not depthwise.

    Depthwise kernels have that input too. They follow a layer with as many outputs, and a
    convolution of 1 x 1 or a dense layer with as many inputs follows them. A first layer has none
    before it, and is followed by a convolution with a window, or by a dense layer of all pixels.
    """
    outputs = module[own][-1]
    before, after = (_beside(module, own, later) for later in (False, True))
    pixels = [x for x in after if len(x) == 2 and x[0] > outputs and x[0] % outputs == 0]
    takers = [x for x in after if x[-2] == outputs]
    windows = [x for x in takers if math.prod(x[:-2]) > 1]
    given = [x for x in before if x[-1] == outputs and not (windows and x in pixels)]
    if given or not is_one_kernel(module, own):
        return False
    return bool(windows or (pixels and not takers))


def _is_grouped(module: Neighbours, own: str) -> bool:
    """Says whether the layer just before gives several times the inputs that a kernel has.

    Two branches may have one input: the layer before has other inputs than this one.
    """
    *_, inputs, outputs = module[own]
    name = re.sub(r"\d+(?=\D*$)", lambda number: str(int(number[0]) - 1), own)
    unnumbered = name.replace("_0/", "/")  # Keras gives its first layer no number
    *_, others, given = module.get(name) or module.get(unnumbered) or (1, 1)
    groups = given // inputs
    return groups > 1 < inputs != others and given % inputs == 0 and outputs % groups == 0


def _beside(module: Neighbours, own: str, later: bool) -> list[Shape]:
    """Lists the kernels that come after one, or before it; those of other names may do both."""
    stem, number = _numbered(own.rpartition("/")[0])
    found = []
    for name, shape in module.items():
        layer, _, leaf = name.rpartition("/")
        other, its_number = _numbered(layer)
        on_this_side = other != stem or (its_number > number) == later
        if leaf == "kernel" and len(shape) > 1 and name != own and on_this_side:
            found.append(shape)
    return found


def _numbered(name: str) -> tuple[str, int]:
    """Splits a name from its last number, which is -1 where there is none."""
    found = re.fullmatch(r"(.*?)(\d*)", name)
    assert found is not None
    return found[1], int(found[2] or -1)
