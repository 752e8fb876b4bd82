"""Rules to write for parameters that no rule can read, one a line."""

import re
from collections.abc import Iterator, Sequence

from optax_muonplus.frame import LeafInfo, fold_all, path_name
from optax_muonplus.trees import unsaid_stacks

_SHOWN = 8
_WIDEST = 7  # side of a kernel, where no name tells it from layers or experts
_DIMS = "omp.MuonDimensionNumbers"


def check_known(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError for leaves that no rule can read, with the lines to write."""
    if not all(leaf.known for leaf in leaves):
        raise ValueError(
            f"No rule says how these parameters are matrices:\n{what_to_write(leaves)}"
        )


def what_to_write(leaves: Sequence[LeafInfo]) -> str:
    """The unknown ones of all ``leaves``, and the rules for them, one a line."""
    unknown = [x for x in leaves if not x.known]
    found = [
        f"  {name} {shape}"
        for name, shape in fold_all((path_name(x.path), x.shape) for x in unknown)
    ]
    if said := _of_stacks(leaves):
        return "\n".join([*_first(found), *said])
    rules = [f"  ({p!r}, {numbers})," for p, numbers in _rules(leaves, unknown)]
    lines = [
        *_first(found),
        "If their axes are what these lines say, pass",
        "rules=[",
        *_first(rules),
        "]",
        "First are the axes of the inputs, then those of the outputs; None is for AdamW.",
        "Axes in neither (layers, experts, separate heads) are batch axes.",
    ]
    container = next(filter(None, map(_container, unknown)), None)
    if container and not any(x.stack for x in leaves):
        lines.append(f"If layers are stacked on axis 0 (1 in MaxText): layer_axes={container}")
    return "\n".join(lines)


def to_adamw(leaves: Sequence[LeafInfo], chosen: Sequence[LeafInfo]) -> str:
    """Rules, as a user writes them, that send the ``chosen`` ones of all ``leaves`` to AdamW."""
    names = {"/".join(x.path) for x in chosen}
    others = [name for name in ("/".join(x.path) for x in leaves) if name not in names]
    patterns = dict.fromkeys(_pattern(name, others) for name in sorted(names))
    return repr([(pattern, None) for pattern in patterns])


def _of_stacks(leaves: Sequence[LeafInfo]) -> list[str]:
    """The axes of layers that unknown leaves seem to have, which come before any rule."""
    seen = [
        stack
        for stack in unsaid_stacks.unsaid_stacks(leaves)
        if not all(leaves[i].known for i in stack.members)
    ]
    if not seen:
        return []
    axes: dict[str, int] = {}
    for stack in seen:
        axes.setdefault(_of_members(stack, seen, leaves), stack.axis)
    where = ", ".join(
        f"{path_name(x.node)!r} ({x.size} on axis {x.axis})" if x.node else f"{x.size} on axis 0"
        for x in seen
    )
    return [
        f"These look like stacked layers: {where}. If they are, pass",
        f"layer_axes={axes!r}",
        "If not, say by a rule what each one is, None for AdamW.",
    ]


def _of_members(
    stack: unsaid_stacks.Stack, seen: Sequence[unsaid_stacks.Stack], leaves: Sequence[LeafInfo]
) -> str:
    """A pattern that finds the members of a stack, and nothing that is in none of those seen."""
    inside = {i for other in seen if other.axis == stack.axis for i in other.members}
    outside = (x for i, x in enumerate(leaves) if i not in inside)
    others = ["/".join(x.path) for x in outside if len(x.shape) > 1]
    node = _escaped("/".join(stack.node))
    held = "|".join(_escaped(leaves[i].path[len(stack.node)]) for i in stack.members)
    patterns = [_escaped(stack.node[-1]), node, f"^{node}/"] if node else []
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in others):
            return pattern
    return f"^{node}/({held})(/|$)" if node else f"^({held})(/|$)"


def _of_a_layer(leaf: LeafInfo) -> list[int]:
    return [size for axis, size in enumerate(leaf.shape) if axis not in leaf.stack]


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])]


def _rules(leaves: Sequence[LeafInfo], unknown: Sequence[LeafInfo]) -> list[tuple[str, str]]:
    """Patterns and dimension numbers: each pattern finds parameters of one kind only."""
    kinds = {"/".join(x.path): _seems_to_be("/".join(x.path), _of_a_layer(x)) for x in unknown}
    # A rule with dimension numbers passes vectors by.
    names = ["/".join(x.path) for x in leaves if len(_of_a_layer(x)) >= 2]
    rules: dict[str, str] = {}
    for name, kind in kinds.items():
        if not any(re.search(p, name) and k == kind for p, k in rules.items()):
            rules[_pattern(name, [x for x in names if kinds.get(x) != kind])] = kind
    return list(rules.items())


def _pattern(name: str, others: Sequence[str]) -> str:
    """The shortest pattern, of some, that finds ``name`` and none of ``others``."""
    for pattern in _patterns(name):
        if not any(re.search(pattern, other) for other in others):
            return pattern
    return f"^{_escaped(name)}$"


def _patterns(name: str) -> Iterator[str]:
    parts = re.sub(r"/(0|array)$", "", name).split("/")
    general = [re.sub(r"\d+", r"\\d+", _escaped(part)) for part in parts]
    if len(parts) > 1 and not all(part.isdigit() for part in parts[-2:]):
        yield "/".join(general[-2:])
    for n in range(min(2, len(parts)), len(parts) + 1):
        start = "^" if n == len(parts) else "(^|/)"
        yield f"{start}{'/'.join(general[-n:])}"
        yield f"{start}{'/'.join(general[-n:])}$"


def _escaped(name: str) -> str:
    return re.sub(r"([.+*?()\[\]])", r"\\\1", name)


def _seems_to_be(name: str, shape: Sequence[int]) -> str:
    """The likely dimension numbers of an unknown leaf; ``shape`` is that of one layer."""
    ndim = len(shape)
    out_first = re.search(r"weight(/0|/array)?$", name) is not None
    sides = shape[2:] if out_first else shape[:-2]
    square = len(sides) > 1 and len(set(sides)) == 1 and 1 < sides[0] <= _WIDEST
    if square or re.search(r"(?i)conv|patch|stem", name):
        inner = tuple(range(1, ndim)) if out_first else tuple(range(ndim - 1))
        return f"{_DIMS}({inner}, {0 if out_first else ndim - 1})"
    return f"{_DIMS}({'-1, -2' if out_first else '-2, -1'})"


def _container(leaf: LeafInfo) -> str | None:
    """``layer_axes`` for what may be a stack of layers; one with a number is one layer."""
    for depth, part in enumerate(leaf.path[:-1]):
        if unsaid_stacks.is_container(leaf.path, depth):
            return f"{{{part!r}: 0}}"
    return None
