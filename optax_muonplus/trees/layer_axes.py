"""Which axes number layers: by the argument ``layer_axes``, or as it seems where nobody says so.

Under a scan each parameter gets an axis of layers: kernels have three axes then, and norms and
biases have two, as a kernel has. A vector of each layer is no matrix. Where nobody states the axis,
the shapes side by side show it.
"""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from optax_muonplus.frame import LeafInfo, Shape
from optax_muonplus.messages import Path, listed

_KERNEL = re.compile("(?i)kernel$|^w$|lora_[ab]$")
_CONTAINER = re.compile(r"(?i)layer|block|stack|stage|scan|^h$")


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
