"""Which axes number layers, by the argument ``layer_axes``, and whether layers are there."""

import collections
import re
from collections.abc import Mapping, Sequence

from optax_muonplus.frame import LeafInfo, Path, Shape, listed, path_name

_KERNEL = re.compile("(?i)kernel$|^w$|lora_[ab]$")


def stack_of(path: Path, shape: Shape, layer_axes: Mapping[str, Shape]) -> Shape:
    """Returns the axes of a leaf that number its layers, by the first pattern found in its path."""
    pattern = _pattern(path, layer_axes)
    if pattern is None or len(shape) < 2:
        return ()
    axes = layer_axes[pattern]
    if not all(-len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(
            f"{path_name(path)} of shape {shape} has no axis {axes}, over which layers that match"
            f" {pattern!r} are stacked. Give a pattern that leaves it out."
        )
    return tuple(sorted({axis % len(shape) for axis in axes}))


def check_one_count(
    paths: Sequence[Path],
    shapes: Sequence[Shape],
    stacks: Sequence[Shape],
    layer_axes: Mapping[str, Shape],
) -> None:
    """Raises ValueError where parameters of one stack have several numbers of layers.

    One stack is what a pattern finds below one node: the name in which the match ends.
    """
    counts: dict[tuple[str, str], dict[Shape, list[tuple[str, Shape]]]]
    counts = collections.defaultdict(lambda: collections.defaultdict(list))
    for path, shape, stack in zip(paths, shapes, stacks, strict=True):
        pattern = _pattern(path, layer_axes) if stack else None
        if pattern is None:
            continue
        name = "/".join(path)
        found = re.search(pattern, name)
        assert found is not None
        node = name[: found.end()] + re.split("/", name[found.end() :])[0]
        layers = tuple(shape[axis] for axis in stack)
        counts[pattern, node.rstrip("/")][layers].append((name, shape))
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
            f" {listed((path_name(x.path), x.shape) for x in wrong)} for layers, which leaves a"
            " vector of a kernel. If they are not stacked, give a pattern that leaves them out; if"
            " they are vectors, a rule with None."
        )


def _pattern(path: Path, layer_axes: Mapping[str, Shape]) -> str | None:
    return next((p for p in layer_axes if re.search(p, "/".join(path))), None)
