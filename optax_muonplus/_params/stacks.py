"""Axes along which layers are stacked: given by ``layer_axes``, or inferred from shapes.

Under a scan each parameter has an axis of layers: a kernel has three axes, and a norm or bias has
two, as an unstacked kernel has. One vector per layer is not a matrix.
"""

import collections
import re
from collections.abc import Mapping, Sequence

from numpy.lib.array_utils import normalize_axis_tuple

from optax_muonplus._leaves.layout import AxisNumbers
from optax_muonplus._leaves.paths import Path, list_paths
from optax_muonplus._leaves.record import LeafInfo

_CONTAINER = re.compile(r"(?i)layer|block|stack|stage|scan|^h$")


def with_stacks(
    leaves: Sequence[LeafInfo], layer_axes: Mapping[str, AxisNumbers]
) -> list[LeafInfo]:
    """Sets ``stack`` on every leaf whose path matches a pattern of ``layer_axes``."""
    # One stack is what a pattern matches below one node, the name in which the match ends.
    stacked, stacks = [], collections.defaultdict(list)
    for leaf in leaves:
        name = "/".join(leaf.path)
        found = ((axes, re.search(pattern, name)) for pattern, axes in layer_axes.items())
        axes, match = next((pair for pair in found if pair[1]), (None, None))
        if axes is not None and match and len(leaf.shape) > 1:
            axes = normalize_axis_tuple(axes, len(leaf.shape), f"layer_axes of {leaf.name}")
            leaf = leaf._replace(stack=tuple(sorted(axes)))
            end = match.end()
            stacks[name[:end] + name[end:].partition("/")[0]].append(leaf)
        stacked.append(leaf)
    for node, members in stacks.items():
        if len({tuple(x.shape[axis] for axis in x.stack) for x in members}) > 1:
            raise ValueError(
                f"layer_axes finds several numbers of layers below {node!r}:"
                f" {list_paths((x.name, x.shape) for x in members)}. One stack has one number of"
                " layers. Give a pattern that leaves out what is not stacked, or give its own axis."
            )
    return stacked


def infer_stacks(leaves: Sequence[LeafInfo]) -> dict[Path, tuple[int, Sequence[LeafInfo]]]:
    """Finds containers that seem to hold stacked layers; returns axis and leaves, by path."""
    below: dict[Path, list[LeafInfo]] = collections.defaultdict(list)
    for leaf in leaves:
        for n in range(1, len(leaf.path)):
            # A container with numbered children is a list, not a stack.
            is_container = _CONTAINER.search(leaf.path[n - 1]) and not leaf.path[n].isdigit()
            if is_container and len(leaf.shape) > 1 and not leaf.stack:
                below[leaf.path[:n]].append(leaf)
    stacks: dict[Path, tuple[int, Sequence[LeafInfo]]] = {}
    for node, members in sorted(below.items(), key=lambda item: len(item[0])):
        axes = [axis for axis in (0, 1) if _is_stack(axis, members)]
        if axes and not any(node[: len(outer)] == outer for outer in stacks):
            stacks[node] = axes[0], members
    return stacks


def _is_stack(axis: int, members: Sequence[LeafInfo]) -> bool:
    """Whether ``axis`` has one size in all members and is a batch axis of the kernels."""
    # A leaf for AdamW, such as a bias of heads, may have other axes.
    kernels = [x for x in members if len(x.shape) > 2 and x.batch_axes]
    batched = all(
        axis in x.batch_axes and x.shape[axis] < max(x.shape[:axis] + x.shape[axis + 1 :])
        for x in kernels
    )
    has_vectors = any(len(x.shape) == 2 for x in members)
    return len({x.shape[axis] for x in members}) == 1 and bool(kernels) and has_vectors and batched
