"""The arguments to write for parameters that no rule can read."""

import re
from collections.abc import Iterator, Sequence

from optax_muonplus._chain.layout import MatrixLayout, MuonDimensionNumbers, Shape
from optax_muonplus._chain.paths import fold_all, path_name
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._params.neighbours import WIDEST
from optax_muonplus._params.stacks import Stack, infer_stacks, is_container

_SHOWN = 8
_SQUARE = 7  # where no name tells a kernel from layers or experts, its sides are no longer
_GUESS = "omp.MuonDimensionNumbers(-2, -1)"


def suggest_rules(leaves: Sequence[LeafInfo]) -> str:
    """Lists the unknown ones of all ``leaves``, and the rules for them, one a line."""
    unknown = [x for x in leaves if not x.known]
    shown = [f"  {name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in unknown)]
    if stacks := [x for x in infer_stacks(leaves) if not all(m.known for m in x.members)]:
        return "\n".join([*_first(shown), *_suggest_layer_axes(stacks, leaves)])
    rules = _rules(leaves, unknown)
    lines = [
        *_first(shown),
        "If their axes are what these lines say, pass",
        "rules=[",
        *_first([f"  ({p!r}, {numbers})," for p, numbers in rules]),
        "]",
        "Arguments: input axes, then output axes. None sends a parameter to AdamW.",
        "Axes in neither (layers, experts, separate heads) are batch axes.",
    ]
    if any(numbers == _GUESS for _, numbers in rules):
        lines += [
            "(-2, -1) is a guess, and wrong for a layer with several axes of outputs or",
            "inputs, such as DenseGeneral: (0, (1, 2)) or ((0, 1), 2).",
        ]
    # A path with a number below the container is that of one layer.
    nodes = (x.path[i] for x in unknown for i in range(len(x.path) - 1) if is_container(x.path, i))
    container = next(nodes, None)
    if container and not any(x.stack for x in leaves):
        lines.append(
            f"If layers are stacked on axis 0 (1 in MaxText): layer_axes={{{container!r}: 0}}"
        )
    return "\n".join(lines)


def rules_for_adamw(leaves: Sequence[LeafInfo], chosen: Sequence[LeafInfo]) -> str:
    """Writes rules that send the ``chosen`` ones of all ``leaves`` to AdamW."""
    names = {"/".join(x.path) for x in chosen}
    others = ["/".join(x.path) for x in leaves if "/".join(x.path) not in names]
    patterns = dict.fromkeys(_pattern(name, others) for name in sorted(names))
    return repr([(pattern, None) for pattern in patterns])


def _suggest_layer_axes(stacks: Sequence[Stack], leaves: Sequence[LeafInfo]) -> list[str]:
    axes: dict[str, int] = {}
    for stack in stacks:
        axes.setdefault(_pattern_of_stack(stack, stacks, leaves), stack.axis)
    where = ", ".join(
        f"{path_name(x.node)!r} ({x.size} on axis {x.axis})" if x.node else f"{x.size} on axis 0"
        for x in stacks
    )
    return [
        f"These look like stacked layers: {where}. If they are, pass",
        f"layer_axes={axes!r}",
        "If not, write a rule for each, None for AdamW.",
    ]


def _pattern_of_stack(stack: Stack, stacks: Sequence[Stack], leaves: Sequence[LeafInfo]) -> str:
    """Finds a pattern for the members of a stack, which finds nothing that is in no stack."""
    inside = {x.index for other in stacks if other.axis == stack.axis for x in other.members}
    outside = (x for x in leaves if x.index not in inside and len(x.shape) > 1)
    others = ["/".join(x.path) for x in outside]
    node = re.escape("/".join(stack.node))
    for pattern in [re.escape(stack.node[-1]), node, f"^{node}/"] if node else []:
        if not _finds_any(pattern, others):
            return pattern
    members = "|".join(re.escape(x.path[len(stack.node)]) for x in stack.members)
    return f"^{node}/({members})(/|$)" if node else f"^({members})(/|$)"


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])]


def _rules(leaves: Sequence[LeafInfo], unknown: Sequence[LeafInfo]) -> list[tuple[str, str]]:
    """Patterns and dimension numbers: each pattern finds parameters of one kind only."""
    biases = {x.path[:-1]: x.layer_shape for x in leaves if x.path[-1:] in (("bias",), ("b",))}
    kinds = {
        "/".join(x.path): _numbers("/".join(x.path), x.layer_shape, biases.get(x.path[:-1], ()))
        for x in unknown
    }
    # A rule with dimension numbers passes vectors by.
    names = ["/".join(x.path) for x in leaves if len(x.layer_shape) >= 2]
    rules: dict[str, str] = {}
    for name, kind in kinds.items():
        if not any(re.search(p, name) and k == kind for p, k in rules.items()):
            rules[_pattern(name, [x for x in names if kinds.get(x) != kind])] = kind
    return list(rules.items())


def _pattern(name: str, others: Sequence[str]) -> str:
    """Finds the shortest pattern, of some, that finds ``name`` and none of ``others``."""
    patterns = (pattern for pattern in _patterns(name) if not _finds_any(pattern, others))
    return next(patterns, f"^{re.escape(name)}$")


def _patterns(name: str) -> Iterator[str]:
    parts = re.sub(r"/(0|array)$", "", name).split("/")
    general = [re.sub(r"\d+", r"\\d+", re.escape(part)) for part in parts]
    if len(parts) > 1 and not all(part.isdigit() for part in parts[-2:]):
        yield "/".join(general[-2:])
    for n in range(min(2, len(parts)), len(parts) + 1):
        start = "^" if n == len(parts) else "(^|/)"
        yield f"{start}{'/'.join(general[-n:])}"
        yield f"{start}{'/'.join(general[-n:])}$"


def _finds_any(pattern: str, names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _numbers(name: str, shape: Shape, bias: Shape) -> str:
    """Writes the likely dimension numbers of an unknown leaf, or None where it is no matrix.

    Muon+ would leave nothing but signs of a matrix with one row or column.
    """
    inputs, outputs = _sides(name, shape, bias)
    layout = MatrixLayout.of(shape, MuonDimensionNumbers(inputs, outputs))
    if min(layout.block_shapes()[0][1:]) == 1:
        return "None"
    shown = (repr(side if len(side) > 1 else side[0]) for side in (inputs, outputs))
    return f"omp.MuonDimensionNumbers({', '.join(shown)})"


def _sides(name: str, shape: Shape, bias: Shape) -> tuple[Shape, Shape]:
    """Guesses the axes of inputs and outputs; ``shape`` is that of one layer.

    A bias has the axes of the outputs, unless each layer or expert may have one.
    """
    ndim, axes = len(shape), tuple(range(len(shape)))
    out_first = re.search(r"weight(_v)?(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    # PyTorch's ConvTranspose2d is (in, out, *window), and Keras' Conv2DTranspose (.., out, in).
    out, other = (0, 1) if out_first else (ndim - 1, ndim - 2)
    if re.search(r"(?i)_transpose|convtranspose|deconv", name):
        out, other = other, out
    bias = tuple(size for size in bias if size > 1)  # Equinox adds axes of length 1
    n = len(bias)
    if 1 < n < ndim and shape[-n:] == bias != (shape[0], shape[-1]):
        return axes[:-n], axes[-n:]
    if n == 1 and bias[0] == shape[other] != shape[out]:
        out = other
    wide = {side for side in sides if side > 1}
    # Experts and layers come first, where a layer of PyTorch has its outputs.
    longest = min(WIDEST, shape[0]) if out_first else _SQUARE
    is_window = (out_first or 1 < len(sides) == sides.count(sides[0])) and max(sides) <= longest
    is_window = (is_window and len(wide) < 2) or re.search(r"(?i)conv|patch|stem", name)
    if is_window or bias == (shape[out],):
        return tuple(axis for axis in axes if axis != out), (out,)
    return ((-1,), (-2,)) if out_first else ((-2,), (-1,))
