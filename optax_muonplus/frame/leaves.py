"""Leaves of trees: their paths, their shardings, and one record for each.

What is written for one container serves another, because leaves are known by their paths.
"""

import collections
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from optax import MaskedNode

from optax_muonplus.frame.layout import DimensionNumbers, MatrixLayout, Shape

Path = tuple[str, ...]
Rest = TypeVar("Rest", bound=Hashable)

VALUE = jax.tree_util.GetAttrKey("value")  # what a Flax Variable holds, in its place in a tree
MUON, ADAM, UNKNOWN = "muon", "adam", "?"
# The rule of a leaf whose dimension numbers come from no rule.
GIVEN = "your dimension numbers"


class LeafSharding(NamedTuple):
    """The sharding of one leaf: for each of its axes the mesh axes that cut it, major first."""

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]


class LeafInfo(NamedTuple):
    """Metadata of one leaf: path, shape, dtype, matrices, sharding.

    Attributes:
      index: its place among the leaves of the tree.
      path: as in ``('blocks', '0', 'attn', 'query', 'kernel')``.
      shape: its shape.
      dtype: its dtype, which is also that of its update.
      layout: its matrices; None for a leaf that is not a matrix, which AdamW updates.
      given_sharding: its entry in the argument ``sharding``.
      sharding: its sharding, if it is a matrix. None on one device, or where it is not
        known before the program is compiled.
      rule: the rule by which it was read, in words.
      known: False for a leaf that no rule can read, in a tree that was resolved to be shown.
      stack: axes that number its layers, by ``layer_axes``.
      dimension_numbers: its layout as a rule or a user wrote it; None for AdamW, and if unknown.
    """

    index: int
    path: Path
    shape: tuple[int, ...]
    dtype: Any
    layout: MatrixLayout | None
    given_sharding: NamedSharding | None = None
    sharding: LeafSharding | None = None
    rule: str = GIVEN
    known: bool = True
    stack: tuple[int, ...] = ()
    dimension_numbers: DimensionNumbers | None = None

    @property
    def name(self) -> str:
        """The path as people read it: ``blocks/0/attn/query/kernel``."""
        return path_name(self.path)

    @property
    def matrix(self) -> MatrixLayout:
        """The layout of a leaf that is known to be a matrix."""
        assert self.layout is not None, self.name
        return self.layout

    @property
    def view(self) -> MatrixLayout | None:
        """The layout by the name that it had until version 0.2; version 0.3 keeps it."""
        return self.layout

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """Axes that number matrices, or may do so where nothing is known."""
        if not self.known:
            return tuple(range(len(self.shape)))
        return () if self.layout is None else self.layout.batch_axes

    @property
    def layer_shape(self) -> Shape:
        """The shape that one of its layers has."""
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.stack)

    @property
    def label(self) -> str:
        """``"muon"`` or ``"adam"``, or ``"?"`` for a leaf that no rule can read."""
        if not self.known:
            return UNKNOWN
        return ADAM if self.layout is None else MUON


class ResolvedTree(NamedTuple):
    """A tree, flattened once: its records, its leaves, and the way back from values to a tree."""

    leaves: list[LeafInfo]
    arrays: list[Any]
    unflatten: Callable[[Iterable[Any]], Any]
    labels: Any  # a tree of "muon" and "adam", each in the place of a leaf or of its box

    @property
    def matrices(self) -> list[LeafInfo]:
        """The records of leaves that are matrices."""
        return [leaf for leaf in self.leaves if leaf.layout is not None]


def flatten_tree(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any], Callable[[Iterable[Any]], Any]]:
    """The paths and leaves of ``tree``, and a function from one value for each leaf to a tree.

    A path is ``('blocks', '0', 'qkv', 'kernel')``. Flax NNX variables add a last ``value`` at init
    that is gone at update: it is dropped, unless it has siblings. Names with slashes in them, as
    Haiku's, count as several.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = [path for path, _ in with_path]
    if any(path[-1:] == (VALUE,) for path in paths):
        # Siblings that were taken out here count too.
        whole = jax.tree_util.tree_leaves_with_path(tree, lambda x: is_hole(x) or is_leaf(x))
        siblings = collections.Counter(path[:-1] for path, _ in whole)
        alone = [path[-1:] == (VALUE,) and siblings[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_of_keys(path) for path in paths], [x for _, x in with_path], treedef.unflatten


def flatten_with_names(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any]]:
    """Returns the paths and leaves of :func:`flatten_tree`."""
    return flatten_tree(tree, is_leaf)[:2]


def is_hole(x: Any) -> bool:
    """Tells whether ``x`` stands for a part that Equinox or ``optax.masked`` left out."""
    return x is None or isinstance(x, MaskedNode)


def path_of_keys(keys: Any) -> Path:
    """Returns the names of a path as ``jax.tree_util`` gives it."""
    joined = jax.tree_util.keystr(keys, simple=True, separator="/")
    return tuple(name for name in joined.split("/") if name)


def path_name(path: Path) -> str:
    """Writes ``path`` as messages show it."""
    return "/".join(path) or "(root)"


def without_numbers(path: str) -> str:
    """Returns a path with stars for its numbers."""
    return re.sub(r"\d+", "*", path)


def fold(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Writes paths that differ in numbers only as few names, and counts the paths of each.

    A name stands for exactly the paths that it spells out: 1 and 3 are ``{1,3}``.
    """
    boxes = [tuple((part,) for part in re.split(r"(\d+)", path)) for path in paths]
    for i in range(len(boxes[0]) - 2, 0, -2):  # the numbers, which are every second part
        merged: dict[Any, list[str]] = {}
        for box in boxes:
            merged.setdefault((box[:i], box[i + 1 :]), []).extend(box[i])
        boxes = [
            (*left, tuple(sorted(numbers, key=lambda text: (len(text), text))), *right)
            for (left, right), numbers in merged.items()
        ]
    return [("".join(map(_ranges, box)), math.prod(map(len, box))) for box in boxes]


def fold_all(paths: Iterable[tuple[str, Rest]]) -> list[tuple[str, Rest]]:
    """Folds paths that differ in numbers only and have the same second item."""
    groups: dict[tuple[str, Rest], list[str]] = {}
    for path, rest in paths:
        groups.setdefault((without_numbers(path), rest), []).append(path)
    return [(name, rest) for (_, rest), found in groups.items() for name, _ in fold(found)]


def listed(paths: Iterable[tuple[str, Any]]) -> str:
    """Writes folded paths for messages, each with its second item unless that is None."""
    return ", ".join(name if rest is None else f"{name} {rest}" for name, rest in fold_all(paths))


def _ranges(values: Sequence[str]) -> str:
    """Writes 0, 1, 2 and 5 as ``{0..2,5}``."""
    runs: list[list[str]] = []
    for value in values:
        # With as many leading zeros as the number before it.
        if runs and value == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][-1])):
            runs[-1].append(value)
        else:
            runs.append([value])
    shown = ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return shown if len(values) == 1 else f"{{{shown}}}"


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that no surrounding ``jax.shard_map`` has taken."""
    taken = axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)


def varying_axes(typed: Any) -> frozenset[str]:
    """Returns the Manual axes over which an array varies, by its type; none if unchecked."""
    kinds = getattr(typed, "manual_axis_type", None)  # since jax 0.10
    return typed.vma if kinds is None else kinds.varying


def as_named(sharding: LeafSharding, kinds: Sequence[AxisType] = tuple(AxisType)) -> NamedSharding:
    """Returns the sharding over those of its mesh axes that are of some kinds."""
    mesh, spec = sharding
    of_kind = {name for kind in kinds for name in axes_of_type(mesh, kind)}
    entries = [tuple(name for name in names if name in of_kind) or None for names in spec]
    return NamedSharding(mesh, PartitionSpec(*entries))
