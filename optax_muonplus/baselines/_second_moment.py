"""What NorMuon and AdaMuon have in common: a running mean of squares of the polar factor."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_muonplus._execution.batches import Read, dtypes_of
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.matrices._matrix_function import matrix_function, static
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import (
    MatrixTransformation,
    apply_to_sources,
    check_function,
    for_matrices,
    with_dtypes,
)
from optax_muonplus.transforms._blocks import map_blocks
from optax_muonplus.transforms._momentum import Momentum

Rescale = Callable[[MatrixView, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def polar_then_rescale(
    average: Momentum,
    before: Callable[[jax.Array], jax.Array] | None,
    polar_factor: Orthogonalize,
    rescale: Rescale,
    init_nu: Callable[[Sequence[LeafInfo], Any, Any], Any],
    make_state: Callable[[Any, Any], Any],
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> MatrixTransformation:
    """Momentum, polar factor, and a rule with a running mean of the polar factor's squares.

    Args:
      average: the momentum.
      before: applied to each element of the momentum, if not None.
      polar_factor: of what results.
      rescale: from the view of a parameter, a block of its polar factor and of the running mean to
        a block of the update and of the next running mean.
      init_nu: from the records of the leaves, the parameters and the state of ``average`` to the
        first running mean.
      make_state: from the state of ``average`` and the running mean to the rule's state, a tuple of
        both.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise.
    """

    def make(leaves: Sequence[LeafInfo]) -> optax.GradientTransformation:
        def init_fn(params: optax.Params) -> Any:
            check_function([polar_factor], leaves)
            mu = average.init(params)
            return make_state(mu, init_nu(leaves, params, mu))

        def update_fn(
            updates: optax.Updates, state: Any, params: optax.Params | None = None
        ) -> tuple[optax.Updates, Any]:
            del params
            mu, nu = state
            mu, read, sources = average.advance(updates, mu, polar_factor.input_dtype)
            read = read if before is None else ReadThen(read, before)
            wide = with_dtypes(leaves, dtypes_of(read, sources))
            factors = apply_to_sources([polar_factor], read, sources, wide)
            factors = jax.tree.structure(updates).unflatten(factors)
            rescaled, nu = map_blocks(rescale, leaves, 2, factors, nu)
            return optax.tree.cast_like(rescaled, updates), make_state(mu, nu)

        return optax.GradientTransformation(init_fn, update_fn)

    return for_matrices(make, dimension_numbers, sharding)


@matrix_function
class ReadThen:
    """A read, and an elementwise function of what it makes."""

    read: Read
    function: Callable[[jax.Array], jax.Array] = static()

    def __call__(self, *sources: jax.Array) -> jax.Array:
        """The matrices."""
        return self.function(self.read(*sources))
