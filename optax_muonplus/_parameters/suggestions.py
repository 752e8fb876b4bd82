"""Rules to write for parameters that no rule can read, one a line."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from optax_muonplus._parameters.paths import Path, fold_all, path_name

_SHOWN = 8
_WIDEST = 7  # side of a kernel, where no name tells it from layers or experts
_DIMS = "omp.MuonDimensionNumbers"


class Leaf(Protocol):
    """What is asked of a parameter here: its path, its shape, and how it was read."""

    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> Any: ...

    @property
    def known(self) -> bool: ...

    @property
    def stack(self) -> Any: ...


def what_to_write(leaves: Sequence[Leaf]) -> str:
    """The unknown ones of all ``leaves``, and the rules for them, one a line."""
    unknown = [x for x in leaves if not x.known]
    found = [
        f"  {name} {shape}"
        for name, shape in fold_all((path_name(x.path), x.shape) for x in unknown)
    ]
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


def _of_a_layer(leaf: Leaf) -> list[int]:
    return [size for axis, size in enumerate(leaf.shape) if axis not in leaf.stack]


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"  and {more} more"] if more > 0 else [])]


def _rules(leaves: Sequence[Leaf], unknown: Sequence[Leaf]) -> list[tuple[str, str]]:
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
    if not all(part.isdigit() for part in parts[-2:]):
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


def _container(leaf: Leaf) -> str | None:
    """``layer_axes`` for what may be a stack of layers; one with a number is one layer."""
    for part, below in zip(leaf.path, leaf.path[1:], strict=False):
        stacks = re.search(r"(?i)layer|block|stack|stage|scan|^h$", part)
        if stacks and not below.isdigit():
            return f"{{{part!r}: 0}}"
    return None
