"""Conditions on the names and shapes of the other parameters in a module, the neighbours.

``module`` has shapes by path: ``{"query/kernel": (512, 8, 64), "out/kernel": (8, 64, 512)}``.
Leaves that ``optax.masked`` or Equinox left out have the shape ``()``. ``path`` is a key of it.
"""

import functools
import re
from collections.abc import Mapping

from optax_muonplus._leaves.layout import Shape
from optax_muonplus._params import attention

Neighbours = Mapping[str, Shape]

_WIDEST = 11  # the longest side of a window, AlexNet's; a longer axis may be layers
_FEW = 4  # the usual width of a depthwise kernel: an axis of up to this size may be a width
# In 14 models, 9 matrices were beyond these limits: 6 wrong readings and 3 real layers.
SHORT, RATIO = 16, 36


def heads_match(module: Neighbours, _path: str, unknown: bool = False) -> bool:
    """Whether queries and outputs have equally many heads; ``unknown`` if one of them is absent."""
    # Queries are (in, heads, head), outputs (heads, head, out). In stacks the numbers differ.
    kernels = [(name, shape) for name, shape in module.items() if len(shape) == 3]
    queries, outputs = (
        {shape[axis] for name, shape in kernels if re.fullmatch(f"{names}/(kernel|w)", name)}
        for names, axis in ((attention.QUERY, 1), (attention.OUT, 0))
    )
    return queries == outputs if queries and outputs else unknown


heads_may_match = functools.partial(heads_match, unknown=True)


def has_no_bias(module: Neighbours, path: str) -> bool:
    """Whether the layer has no bias; a table of vectors never has one."""
    layer = path.rpartition("/")[0]
    return not {f"{layer}/bias", f"{layer}/b"} & module.keys()


def is_table(module: Neighbours, path: str) -> bool:
    """Whether a weight may be a table: its layer has no bias, or it has few features."""
    is_weight = re.search(r"(^|/)(kernel|w|weight)$", path)
    return not is_weight or has_no_bias(module, path) or min(module[path]) <= SHORT


def is_bias(module: Neighbours, path: str) -> bool:
    """Whether a weight of the same layer, by name or number, has this shape and one more axis."""
    bias = module[path]
    before = re.sub(r"\d+$", lambda number: str(int(number[0]) - 1), path)
    name = re.sub("(?i)(^|/|_)(bias(es)?|b)", r"(\1(\2|w|weights?|kernels?))?", re.escape(path))
    named = {x for other, x in module.items() if re.fullmatch(name, other, re.I)}
    shapes = {*named, module.get(before, ())}
    shorter = {(*x[:axis], *x[axis + 1 :]) for x in shapes for axis in range(len(x))}
    return len(bias) > 1 and (bias in shorter or () in named)  # (): left out, its name decides


def is_plausible(batch: int, rows: int, columns: int, too_short: int = 0) -> bool:
    """Whether a batch of matrices has sides and a size that layers have."""
    short, long = sorted((rows, columns))
    return short > too_short and long < RATIO * short and batch <= 2 * long


def are_many(module: Neighbours, path: str) -> bool:
    """Whether the first axis may be a batch axis."""
    return is_plausible(*module[path])


def is_outermost(module: Neighbours, path: str) -> bool:
    """Whether no sibling layer is named like a query, key, gate or up projection."""
    layer = path.split("/")[0]
    # Siblings are other layers of the module, or other leaves of the same layer.
    parts = [name.split("/") for name in module if name != path]
    names = {name[-1] if name[0] == layer else name[0] for name in parts}
    return not any(re.fullmatch(attention.INNER, name, re.I) for name in names)


def is_alone(module: Neighbours, path: str) -> bool:
    """Whether no sibling layer has this shape, or a name as in :func:`is_outermost`."""
    return is_outermost(module, path) and list(module.values()).count(module[path]) == 1


def is_one_kernel(module: Neighbours, path: str) -> bool:
    """Whether a kernel (window, inputs, outputs) is neither stacked layers nor grouped."""
    # The sides of a window are equal or 1: (3, 3), (1, 7), (1, 3, 3). A kernel with one side and
    # few inputs, such as (12, 4, 1024), may be 12 depthwise kernels.
    *window, inputs, _ = module[path]
    if len(window) == 1:
        fits = window[0] <= max(inputs, _WIDEST) and not 1 < inputs <= _FEW
    else:
        sides = {side for side in window if side > 1}
        fits = len(sides) == 1 and (1 not in window or max(sides) <= _WIDEST)
    return fits and not _is_grouped(module, path)


def _is_grouped(module: Neighbours, path: str) -> bool:
    """Whether the outputs of the layer before are a multiple of the kernel's inputs."""
    *_, inputs, outputs = module[path]
    name = re.sub(r"\d+(?=\D*$)", lambda number: str(int(number[0]) - 1), path)
    unnumbered = name.replace("_0/", "/")  # Keras gives its first layer no number
    *_, others, before = module.get(name) or module.get(unnumbered) or (1, 1)
    groups = before // inputs
    # Equal inputs may mean two branches of one input.
    return groups > 1 < inputs != others and before % inputs == 0 and outputs % groups == 0


def bias_of(module: Neighbours, path: str) -> Shape:
    """Returns the shape of the layer's bias without axes of size 1; ``()`` if there is none."""
    layer = path.rpartition("/")[0]
    own = [f"{layer}/{name}".lstrip("/") for name in ("bias", "b")]
    bias = next((module[name] for name in own if module.get(name)), ())
    # In a layer with several matrices it may be the bias of another one.
    has_others = bias and any(
        name.rpartition("/")[0] == layer and sum(n > 1 for n in shape) > 1
        for name, shape in module.items()
        if name not in (*own, path)
    )
    return () if has_others else tuple(size for size in bias if size > 1)
