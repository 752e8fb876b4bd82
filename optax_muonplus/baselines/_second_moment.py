"""What NorMuon and AdaMuon have in common: a running mean of squares of the polar factor."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import (
    MatrixTransformation,
    apply_to_arrays,
    check_function,
    for_matrices,
    without_rounding,
)
from optax_muonplus.transforms._blocks import map_blocks

Rescale = Callable[[MatrixView, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def polar_then_rescale(
    average: optax.GradientTransformation,
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
            mu, nu = state
            moments, mu = average.update(updates, mu, params)
            moments = jax.tree.map(before, moments) if before else moments
            arrays, treedef = jax.tree.flatten(moments)
            wide = without_rounding(leaves, arrays)
            factors = apply_to_arrays([polar_factor], arrays, wide)
            rescaled, nu = map_blocks(rescale, leaves, 2, treedef.unflatten(factors), nu)
            return optax.tree.cast_like(rescaled, updates), make_state(mu, nu)

        return optax.GradientTransformation(init_fn, update_fn)

    return for_matrices(make, dimension_numbers, sharding)
