"""Which parameters are matrices, how they are read, and their shardings: one object for all."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from optax_muonplus._chain.chain import MatrixTransformation
from optax_muonplus._leaves.layout import DimensionNumbersTree
from optax_muonplus._leaves.paths import list_paths
from optax_muonplus._leaves.record import ResolvedTree
from optax_muonplus._params.patterns import LayerAxes, Rules
from optax_muonplus._params.reader import Reader, RuleReader, reader_of
from optax_muonplus._params.resolve import resolve
from optax_muonplus._params.sharding import ShardingTree, shard_like_params


@dataclasses.dataclass(frozen=True, eq=False)
class Matrices:
    """Which parameters are matrices, how their axes make rows and columns, and their shardings.

    Links for matrices take it as ``where``; its ``labels`` are those for ``optax.partition``.

    Attributes:
      rules: as in :func:`optax_muonplus.muonplus`, like all other fields.
      layer_axes: the axes along which layers are stacked.
      weight_dimension_numbers: instead of both, a tree, prefix tree or function. ``muonplus`` calls
        it ``muon_weight_dimension_numbers``, as ``optax.contrib.muon`` does.
      sharding: the shardings of the parameters.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> where = omp.Matrices(rules=[("readout", None)])
      >>> matrices = omp.matrix_chain(
      ...     omp.momentum(), omp.orthogonalize(), optax.scale_by_learning_rate(0.02), where=where
      ... )
      >>> tx = optax.partition({"muon": matrices, "adam": optax.nadamw(3e-3)}, matrices.labels)
      >>> params = {"up": {"kernel": jnp.ones((4, 8))}, "readout": {"kernel": jnp.ones((8, 2))}}
      >>> matrices.labels(params)
      {'readout': {'kernel': 'adam'}, 'up': {'kernel': 'muon'}}
    """

    rules: Rules = ()
    layer_axes: LayerAxes = None
    weight_dimension_numbers: DimensionNumbersTree = None
    sharding: ShardingTree = None

    def __post_init__(self) -> None:
        """Raises ValueError for malformed rules or axes, and for both beside dimension numbers."""
        self._reader  # noqa: B018

    @functools.cached_property
    def _reader(self) -> Reader:
        return reader_of(self.weight_dimension_numbers, self.rules, self.layer_axes)

    @property
    def is_default(self) -> bool:
        """Whether all fields have their defaults."""
        given = self.weight_dimension_numbers, self.sharding
        return given == (None, None) and not self.rules and not self.layer_axes

    def labels(self, params: Any) -> Any:
        """Returns ``"muon"`` or ``"adam"`` for every parameter or update.

        Raises:
          ValueError: for matrices that links without these fields would read in another way. Use
            the ``labels`` of a link that has them.
        """
        tree, default = self.read(params), resolve(params, RuleReader(), strict=False)
        pairs = zip(tree.leaves, default.leaves, strict=True)
        if other := [(x.name, None) for x, y in pairs if x.layout and x.layout != y.layout]:
            raise ValueError(
                f"Links without these rules or dimension numbers read {list_paths(other)} in"
                " another way. Use the labels of links that have them: chain.labels, where"
                " chain = omp.matrix_chain(..., where=where)."
            )
        return tree.labels

    def read(self, tree: Any) -> ResolvedTree:
        """Returns the records of all leaves."""
        return resolve(tree, self._reader, self.sharding)

    def place(self, state: Any, tree: ResolvedTree) -> Any:
        """Shards the first state like the parameters."""
        return shard_like_params(state, tree)


class MatricesFields(TypedDict, total=False):
    """The attributes of :class:`Matrices` as keywords."""

    rules: Rules
    layer_axes: LayerAxes
    weight_dimension_numbers: DimensionNumbersTree
    sharding: ShardingTree


def where_of(where: Matrices | None, fields: Mapping[str, Any]) -> Matrices | None:
    """Returns ``where``, or a ``Matrices`` of ``fields``; raises ValueError for both."""
    # optax.inject_hyperparams passes collected ``**fields`` on as one argument ``fields``.
    chosen = {**fields, **fields.get("fields", {})}
    chosen.pop("fields", None)
    where = chosen.pop("where", where)
    if not isinstance(where, Matrices | None):
        raise TypeError(f"where= takes omp.Matrices(...), got {where!r}.")
    if where is not None and chosen:
        raise ValueError(f"Got {', '.join(chosen)} beside where=. Give them to omp.Matrices(...).")
    return Matrices(**chosen) if chosen else where


def one_of(given: Sequence[Any]) -> Matrices:
    """Returns the only non-default ``Matrices`` of ``given``, or the default; two are an error."""
    chosen = list({id(where): where for where in given if not where.is_default}.values())
    if len(chosen) > 1:
        raise ValueError(
            "Got two different where=, of two links or of a link and the chain. Make one"
            " omp.Matrices(...) and pass it once."
        )
    return chosen[0] if chosen else Matrices()


def partition_labels(params: Any, where: Matrices | MatrixTransformation | None = None) -> Any:
    """Returns ``"muon"`` or ``"adam"`` for every parameter: the labels for ``optax.partition``.

    Args:
      params: parameters or updates.
      where: the links, or :class:`Matrices`; None means the default rules.

    Raises:
      ValueError: as :meth:`Matrices.labels`.
    """
    return (Matrices() if where is None else where).labels(params)
