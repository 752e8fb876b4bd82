"""Layers that seem to be stacked along an axis that nobody stated, by the shapes side by side.

Under a scan each parameter gets an axis of layers: kernels have three axes then, and norms and
biases have two, as a kernel has. A vector of each layer is no matrix.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optax_muonplus.frame import LeafInfo, Path

_CONTAINER = re.compile(r"(?i)layer|block|stack|stage|scan|^h$")


class Stack(NamedTuple):
    """Parameters that have as many layers, it seems."""

    node: Path  # below which they all are
    axis: int
    size: int  # how many layers
    members: Sequence[int]  # which of the leaves


def is_container(path: Path, depth: int) -> bool:
    """Whether the name at ``depth`` may be that of stacked layers; one with a number is one."""
    return _CONTAINER.search(path[depth]) is not None and not path[depth + 1].isdigit()


def unsaid_stacks(leaves: Sequence[LeafInfo]) -> list[Stack]:
    """The stacks that leaves of two axes are in beside others of three and more."""
    kernels = [x for x in leaves if len(x.shape) > 2 and not x.stack and {0, 1} & {*x.batch_axes}]
    nodes = {x.path[:n] for x in kernels for n in range(len(x.path))}
    found: list[Stack] = []
    for node in sorted(nodes, key=len):
        if not any(node[: len(other.node)] == other.node for other in found):
            below = [i for i, x in enumerate(leaves) if x.path[: len(node)] == node != x.path]
            found += _stacks(node, leaves, below)
    return found


def _stacks(node: Path, leaves: Sequence[LeafInfo], below: Sequence[int]) -> Iterator[Stack]:
    """The stack of all leaves below a node, or of those that it holds itself."""
    arrays = [i for i in below if len(leaves[i].shape) > 1 and not leaves[i].stack]
    depth = len(node) - 1
    named = depth >= 0 and all(is_container(leaves[i].path, depth) for i in below)
    for axis in (0, 1):
        stack = _stack(node, axis, leaves, arrays)
        if stack and (named or (axis == 0 and node and _is_short(stack, leaves, below))):
            yield stack
            return
    own = [i for i in arrays if leaves[i].path[:-1] == node]
    first = {leaves[i].shape[0] for i in own if len(leaves[i].shape) > 2}
    own = [i for i in own if leaves[i].shape[0] in first]
    stack = _stack(node, 0, leaves, own)
    if stack and _is_short(stack, leaves, own):
        yield stack


def _stack(
    node: Path, axis: int, leaves: Sequence[LeafInfo], members: Sequence[int]
) -> Stack | None:
    """The stack that ``members`` are, if they have one size on ``axis`` and two kinds are there."""
    # Of what AdamW gets, as biases of heads, no axis is asked.
    kernels = [x for x in map(leaves.__getitem__, members) if len(x.shape) > 2 and x.batch_axes]
    vectors = [x for x in map(leaves.__getitem__, members) if len(x.shape) == 2]
    sizes = {leaves[i].shape[axis] for i in members}
    # Layers are fewer than the inputs or outputs of their widest kernel.
    long = all(axis in x.batch_axes and x.shape[axis] < max(_others(x, axis)) for x in kernels)
    if len(sizes) != 1 or not kernels or not vectors or not long:
        return None
    paths = [leaves[i].path[:-1] for i in members]
    same = [len(set(names)) == 1 for names in zip(*paths, strict=False)]
    shared = paths[0][: (*same, False).index(False)]
    return Stack(shared, axis, sizes.pop(), members)


def _is_short(stack: Stack, leaves: Sequence[LeafInfo], below: Sequence[int]) -> bool:
    """Whether all leaves have that first axis, vectors too, and it is the shortest of each."""
    shapes = [leaves[i].shape for i in below]
    return all(x[:1] == (stack.size,) and min(x[1:], default=1 << 62) > stack.size for x in shapes)


def _others(leaf: LeafInfo, axis: int) -> list[int]:
    return [size for i, size in enumerate(leaf.shape) if i != axis]
