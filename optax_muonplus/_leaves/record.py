"""A record of each leaf of a tree: its path, its matrices and its sharding."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from optax_muonplus._leaves.layout import DimensionNumbers, MatrixLayout, Shape
from optax_muonplus._leaves.paths import Path, path_name
from optax_muonplus._leaves.placement import LeafSharding

MUON, ADAM, UNKNOWN = "muon", "adam", "?"
GIVEN = "your dimension numbers"  # in place of a rule


class LeafInfo(NamedTuple):
    """Metadata of one leaf: path, shape, dtype, matrices, sharding.

    Attributes:
      index: its place among the leaves of the tree.
      path: as in ``('blocks', '0', 'attn', 'query', 'kernel')``.
      shape: its shape.
      dtype: its dtype, which its update has too.
      layout: its matrices; None for a leaf that is not a matrix, which AdamW updates.
      given_sharding: its entry in the argument ``sharding``.
      sharding: its sharding, if a matrix. None on one device, or if unknown before compilation.
      rule: the rule that read it, in words.
      known: False for a leaf that no rule can read, as ``describe`` shows it.
      stack: axes along which its layers are stacked, by ``layer_axes``.
      dimension_numbers: its layout as a rule or a user wrote it; None for AdamW, or if unknown.
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
        return path_name(self.path)

    @property
    def matrix(self) -> MatrixLayout:
        assert self.layout is not None, self.name
        return self.layout

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """Axes along which each index is a matrix; all axes of an unknown leaf: any may be one."""
        if not self.known:
            return tuple(range(len(self.shape)))
        return () if self.layout is None else self.layout.batch_axes

    @property
    def layer_shape(self) -> Shape:
        return tuple(size for axis, size in enumerate(self.shape) if axis not in self.stack)

    @property
    def label(self) -> str:
        """``"muon"``, ``"adam"``, or ``"?"`` for a leaf that no rule can read."""
        if not self.known:
            return UNKNOWN
        return ADAM if self.layout is None else MUON


class ResolvedTree(NamedTuple):
    """A tree, flattened once: its records and leaves, and the way back to a tree."""

    leaves: list[LeafInfo]
    arrays: list[Any]
    unflatten: Callable[[Iterable[Any]], Any]
    labels: Any  # a tree of "muon" and "adam", one for each leaf or box

    @property
    def matrices(self) -> list[LeafInfo]:
        return [leaf for leaf in self.leaves if leaf.layout is not None]
