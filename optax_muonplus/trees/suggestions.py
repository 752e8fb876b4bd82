"""The arguments to write for parameters that no rule can read."""

import re
from collections.abc import Iterator, Sequence

from optax_muonplus.frame import LeafInfo, Shape
from optax_muonplus.messages import fold_all, path_name
from optax_muonplus.trees.layer_axes import Stack, is_container, unsaid_stacks

_SHOWN = 8
_WIDEST = 7  # where no name tells a kernel from layers or experts, its sides are no longer
_DIMS = "omp.MuonDimensionNumbers"
_GUESS = f"{_DIMS}(-2, -1)"


def what_to_write(leaves: Sequence[LeafInfo]) -> str:
    """Lists the unknown ones of all ``leaves``, and the rules for them, one a line."""
    unknown = [x for x in leaves if not x.known]
    found = [f"  {name} {shape}" for name, shape in fold_all((x.name, x.shape) for x in unknown)]
    if said := _of_stacks(leaves):
        return "\n".join([*_first(found), *said])
    rules = _rules(leaves, unknown)
    lines = [
        *_first(found),
        "If their axes are what these lines say, pass",
        "rules=[",
        *_first([f"  ({p!r}, {numbers})," for p, numbers in rules]),
        "]",
        "First are the axes of the inputs, then those of the outputs; None is for AdamW.",
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


def to_adamw(leaves: Sequence[LeafInfo], chosen: Sequence[LeafInfo]) -> str:
    """Writes rules that send the ``chosen`` ones of all ``leaves`` to AdamW."""
    names = {"/".join(x.path) for x in chosen}
    others = ["/".join(x.path) for x in leaves if "/".join(x.path) not in names]
    patterns = dict.fromkeys(_pattern(name, others) for name in sorted(names))
    return repr([(pattern, None) for pattern in patterns])


def _of_stacks(leaves: Sequence[LeafInfo]) -> list[str]:
    """Writes the axes of layers that unknown leaves seem to have, which come before any rule."""
    found = unsaid_stacks(leaves)
    seen = [stack for stack in found if not all(x.known for x in stack.members)]
    if not seen:
        return []
    axes: dict[str, int] = {}
    for stack in seen:
        axes.setdefault(_pattern_of_stack(stack, seen, leaves), stack.axis)
    where = ", ".join(
        f"{path_name(x.node)!r} ({x.size} on axis {x.axis})" if x.node else f"{x.size} on axis 0"
        for x in seen
    )
    return [
        f"These look like stacked layers: {where}. If they are, pass",
        f"layer_axes={axes!r}",
        "If not, say by a rule what each one is, None for AdamW.",
    ]


def _pattern_of_stack(stack: Stack, seen: Sequence[Stack], leaves: Sequence[LeafInfo]) -> str:
    """Finds a pattern for the members of a stack, which finds nothing that is in no stack."""
    inside = {x.index for other in seen if other.axis == stack.axis for x in other.members}
    outside = (x for x in leaves if x.index not in inside and len(x.shape) > 1)
    others = ["/".join(x.path) for x in outside]
    node = _escaped("/".join(stack.node))
    for pattern in [_escaped(stack.node[-1]), node, f"^{node}/"] if node else []:
        if not _finds_any(pattern, others):
            return pattern
    held = "|".join(_escaped(x.path[len(stack.node)]) for x in stack.members)
    return f"^{node}/({held})(/|$)" if node else f"^({held})(/|$)"


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])]


def _rules(leaves: Sequence[LeafInfo], unknown: Sequence[LeafInfo]) -> list[tuple[str, str]]:
    """Patterns and dimension numbers: each pattern finds parameters of one kind only."""
    biases = {x.path[:-1]: x.layer_shape for x in leaves if x.path[-1:] in (("bias",), ("b",))}
    kinds = {
        "/".join(x.path): _seems_to_be("/".join(x.path), x.layer_shape, biases.get(x.path[:-1], ()))
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
    found = (pattern for pattern in _patterns(name) if not _finds_any(pattern, others))
    return next(found, f"^{_escaped(name)}$")


def _patterns(name: str) -> Iterator[str]:
    parts = re.sub(r"/(0|array)$", "", name).split("/")
    general = [re.sub(r"\d+", r"\\d+", _escaped(part)) for part in parts]
    if len(parts) > 1 and not all(part.isdigit() for part in parts[-2:]):
        yield "/".join(general[-2:])
    for n in range(min(2, len(parts)), len(parts) + 1):
        start = "^" if n == len(parts) else "(^|/)"
        yield f"{start}{'/'.join(general[-n:])}"
        yield f"{start}{'/'.join(general[-n:])}$"


def _finds_any(pattern: str, names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


def _escaped(name: str) -> str:
    return re.sub(r"([.+*?()\[\]])", r"\\\1", name)


def _seems_to_be(name: str, shape: Shape, bias: Shape) -> str:
    """Guesses the dimension numbers of an unknown leaf; ``shape`` is that of one layer.

    A bias has the axes of the outputs, unless each layer or expert may have one.
    """
    ndim = len(shape)
    out_first = re.search(r"weight(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    square = len(sides) > 1 and len(set(sides)) == 1 and 1 < sides[0] <= _WIDEST
    if square or re.search(r"(?i)conv|patch|stem", name):
        outer = 0 if out_first else ndim - 1
        # PyTorch's ConvTranspose2d is (in, out, *kernel), and Keras' Conv2DTranspose (.., out, in).
        if re.search(r"(?i)_transpose|convtranspose|deconv", name):
            outer = 1 if out_first else ndim - 2
        return f"{_DIMS}({tuple(i for i in range(ndim) if i != outer)}, {outer})"
    n = len(bias)
    if 0 < n < ndim and shape[-n:] == bias and bias != (shape[0], shape[-1]):
        ins, outs = tuple(range(ndim - n)), tuple(range(ndim - n, ndim))
        return f"{_DIMS}({ins if ins[1:] else 0}, {outs if outs[1:] else ndim - 1})"
    return f"{_DIMS}(-1, -2)" if out_first else _GUESS
