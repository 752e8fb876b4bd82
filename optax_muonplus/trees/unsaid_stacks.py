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
    members: Sequence[LeafInfo]


def is_container(path: Path, depth: int) -> bool:
    """Says whether a name may be that of stacked layers: what has numbers below it is none."""
    return _CONTAINER.search(path[depth]) is not None and not path[depth + 1].isdigit()


def unsaid_stacks(leaves: Sequence[LeafInfo]) -> list[Stack]:
    """Finds the stacks that leaves of two axes are in beside others of three and more."""
    kernels = [x for x in leaves if len(x.shape) > 2 and not x.stack and {0, 1} & {*x.batch_axes}]
    nodes = {x.path[:n] for x in kernels for n in range(len(x.path))}
    found: list[Stack] = []
    for node in sorted(nodes, key=len):
        if not any(node[: len(other.node)] == other.node for other in found):
            found += _stacks(node, [x for x in leaves if x.path[: len(node)] == node != x.path])
    return found


def _stacks(node: Path, below: Sequence[LeafInfo]) -> Iterator[Stack]:
    """Finds the stack of all leaves below a node, or of those that it holds itself."""
    arrays = [x for x in below if len(x.shape) > 1 and not x.stack]
    depth = len(node) - 1
    named = depth >= 0 and all(is_container(x.path, depth) for x in below)
    for axis in (0, 1):
        stack = _stack(axis, arrays)
        if stack and (named or (axis == 0 and node and _is_short(stack, below))):
            yield stack
            return
    own = [x for x in arrays if x.path[:-1] == node]
    first = {x.shape[0] for x in own if len(x.shape) > 2}
    own = [x for x in own if x.shape[0] in first]
    stack = _stack(0, own)
    if stack and _is_short(stack, own):
        yield stack


def _stack(axis: int, members: Sequence[LeafInfo]) -> Stack | None:
    """Makes a stack of members with one size on ``axis``, if both kernels and vectors are there."""
    # A leaf that AdamW gets, as a bias of heads, may have other axes.
    kernels = [x for x in members if len(x.shape) > 2 and x.batch_axes]
    vectors = [x for x in members if len(x.shape) == 2]
    sizes = {x.shape[axis] for x in members}
    # Layers are fewer than the inputs or outputs of their widest kernel.
    long = all(
        axis in x.batch_axes and x.shape[axis] < max(x.shape[:axis] + x.shape[axis + 1 :])
        for x in kernels
    )
    if len(sizes) != 1 or not kernels or not vectors or not long:
        return None
    paths = [x.path[:-1] for x in members]
    same = [len(set(names)) == 1 for names in zip(*paths, strict=False)]
    shared = paths[0][: (*same, False).index(False)]
    return Stack(shared, axis, sizes.pop(), members)


def _is_short(stack: Stack, below: Sequence[LeafInfo]) -> bool:
    """Says whether all leaves, vectors too, have that first axis, the shortest of each."""
    shapes = [x.shape for x in below]
    return all(x[:1] == (stack.size,) and min(x[1:], default=1 << 62) > stack.size for x in shapes)
