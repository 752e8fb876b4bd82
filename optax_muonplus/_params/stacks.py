"""Finds the axes along which layers are stacked: given by ``layer_axes``, or inferred from shapes.

Under a scan each parameter gets an axis of layers: kernels have three axes then, and norms and
biases have two, as a kernel has. A vector of each layer is no matrix.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optax_muonplus._chain.layout import Shape
from optax_muonplus._chain.paths import Path, listed
from optax_muonplus._chain.record import LeafInfo

_KERNEL = re.compile("(?i)kernel$|^w$")
_CONTAINER = re.compile(r"(?i)layer|block|stack|stage|scan|^h$")


def with_stacks(leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape]) -> list[LeafInfo]:
    """Sets ``stack`` on every leaf that a pattern of ``layer_axes`` finds.

    Raises ValueError for axes that a leaf has not, and where one stack has several sizes.
    """
    stacked = [leaf._replace(stack=_stack_of(leaf, layer_axes)) for leaf in leaves]
    _check_one_count(stacked, layer_axes)
    return stacked


def _stack_of(leaf: LeafInfo, layer_axes: Mapping[str, Shape]) -> Shape:
    pattern, ndim = _pattern(leaf.path, layer_axes), len(leaf.shape)
    if pattern is None or ndim < 2:
        return ()
    axes = layer_axes[pattern]
    if not axes or not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"{leaf.name} of shape {leaf.shape} has no axis {axes}, over which layers that match"
            f" {pattern!r} are stacked. Give a pattern that leaves it out."
        )
    return tuple(sorted({axis % ndim for axis in axes}))


def _check_one_count(leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape]) -> None:
    """Raises ValueError where parameters of one stack have several numbers of layers.

    One stack is what a pattern finds below one node: the name in which the match ends.
    """
    stacks: dict[tuple[str, str], list[LeafInfo]] = collections.defaultdict(list)
    for leaf in leaves:
        pattern, name = _pattern(leaf.path, layer_axes), "/".join(leaf.path)
        found = re.search(pattern, name) if pattern and leaf.stack else None
        if pattern and found:
            node = name[: found.end()] + name[found.end() :].split("/")[0]
            stacks[pattern, node.rstrip("/")].append(leaf)
    for (pattern, node), members in stacks.items():
        if len({tuple(x.shape[axis] for axis in x.stack) for x in members}) > 1:
            raise ValueError(
                f"layer_axes={{{pattern!r}: ...}} finds several numbers of layers below {node!r}:"
                f" {listed((x.name, x.shape) for x in members)}. One stack has one number of"
                " layers. Give a pattern that leaves out what is not stacked, or its own axis."
            )


def check_kernels(leaves: Sequence[LeafInfo], layer_axes: Mapping[str, Shape]) -> None:
    """Raises ValueError for kernels, by their names, of which ``layer_axes`` leaves a vector."""
    wrong = [
        x
        for x in leaves
        if x.stack
        and len(x.layer_shape) < 2
        and x.rule.startswith("vector")
        and _KERNEL.search(x.path[-1])
    ]
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


class Stack(NamedTuple):
    """Parameters that seem to have an axis of layers in common."""

    node: Path  # the container of all of them
    axis: int
    size: int  # the number of layers
    members: Sequence[LeafInfo]


def infer_stacks(leaves: Sequence[LeafInfo]) -> list[Stack]:
    """Finds containers, by their names, whose leaves of two axes seem to be vectors of layers.

    All leaves of two axes and more below such a container have one size on one axis, which batches
    the kernels among them and is shorter than their widest side. A container with numbered
    children is a list, not a stack.
    """
    below: dict[Path, list[LeafInfo]] = collections.defaultdict(list)
    for leaf in leaves:
        for n in range(1, len(leaf.path)):
            is_container = _CONTAINER.search(leaf.path[n - 1]) and not leaf.path[n].isdigit()
            if is_container and len(leaf.shape) > 1 and not leaf.stack:
                below[leaf.path[:n]].append(leaf)
    stacks: list[Stack] = []
    for node, members in sorted(below.items(), key=lambda item: len(item[0])):
        is_inside = any(node[: len(stack.node)] == stack.node for stack in stacks)
        axis = next((axis for axis in (0, 1) if _is_stack(axis, members)), None)
        if axis is not None and not is_inside:
            stacks.append(Stack(node, axis, members[0].shape[axis], members))
    return stacks


def _is_stack(axis: int, members: Sequence[LeafInfo]) -> bool:
    """Whether members have one size on ``axis``, and both kernels and vectors are among them."""
    # A leaf that AdamW gets, as a bias of heads, may have other axes.
    kernels = [x for x in members if len(x.shape) > 2 and x.batch_axes]
    batched = all(
        axis in x.batch_axes and x.shape[axis] < max(x.shape[:axis] + x.shape[axis + 1 :])
        for x in kernels
    )
    has_vectors = any(len(x.shape) == 2 for x in members)
    return len({x.shape[axis] for x in members}) == 1 and bool(kernels) and has_vectors and batched
