"""Which axes number layers, by the argument ``layer_axes``, and whether layers are there."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from optax_muonplus.frame import LeafInfo, Path, Shape, listed

_KERNEL = re.compile("(?i)kernel$|^w$|lora_[ab]$")


def with_stacks(
    leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape], said: Sequence[Any]
) -> list[LeafInfo]:
    """Notes the axes that number layers, of all leaves but those whose layers ``said`` theirs.

    Raises ValueError for axes that a leaf has not, and where one stack has several sizes.
    """
    found = [
        leaf if layer else leaf._replace(stack=_stack_of(leaf, layer_axes))
        for leaf, layer in zip(leaves, said, strict=True)
    ]
    _check_one_count(found, layer_axes)
    return found


def _stack_of(leaf: LeafInfo, layer_axes: Mapping[str, Shape]) -> Shape:
    """Returns the axes of a leaf that number its layers, by the first pattern found in its path."""
    pattern, ndim = _pattern(leaf.path, layer_axes), len(leaf.shape)
    if pattern is None or ndim < 2:
        return ()
    axes = layer_axes[pattern]
    if not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"{leaf.name} of shape {leaf.shape} has no axis {axes}, over which layers that match"
            f" {pattern!r} are stacked. Give a pattern that leaves it out."
        )
    return tuple(sorted({axis % ndim for axis in axes}))


def _check_one_count(leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape]) -> None:
    """Raises ValueError where parameters of one stack have several numbers of layers.

    One stack is what a pattern finds below one node: the name in which the match ends.
    """
    counts: dict[tuple[str, str], dict[Shape, list[tuple[str, Shape]]]]
    counts = collections.defaultdict(lambda: collections.defaultdict(list))
    for leaf in leaves:
        pattern, name = _pattern(leaf.path, layer_axes), "/".join(leaf.path)
        found = re.search(pattern, name) if pattern and leaf.stack else None
        if pattern and found:
            node = name[: found.end()] + name[found.end() :].split("/")[0]
            layers = tuple(leaf.shape[axis] for axis in leaf.stack)
            counts[pattern, node.rstrip("/")][layers].append((name, leaf.shape))
    for (pattern, node), by_count in counts.items():
        if len(by_count) > 1:
            shown = "; ".join(
                f"{'x'.join(map(str, layers))} in {listed(found)}"
                for layers, found in by_count.items()
            )
            raise ValueError(
                f"layer_axes={{{pattern!r}: ...}} finds several numbers of layers below {node!r}:"
                f" {shown}. One stack has one number of layers. Give a pattern that leaves out what"
                " is not stacked, or its own axis."
            )


def check_kernels(leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape]) -> None:
    """Raises ValueError for kernels, by their names, of which ``layer_axes`` leaves a vector."""
    wrong = [x for x in leaves if x.rule.startswith("vector; ") and _KERNEL.search(x.path[-1])]
    if wrong:
        patterns = dict.fromkeys(_pattern(x.path, layer_axes) for x in wrong)
        raise ValueError(
            f"layer_axes for {', '.join(map(repr, patterns))} takes an axis of"
            f" {listed((x.name, x.shape) for x in wrong)} for layers, which leaves a"
            " vector of a kernel. If they are not stacked, give a pattern that leaves them out; if"
            " they are vectors, a rule with None."
        )


def _pattern(path: Path, layer_axes: Mapping[str, Shape]) -> str | None:
    return next((p for p in layer_axes if re.search(p, "/".join(path))), None)
