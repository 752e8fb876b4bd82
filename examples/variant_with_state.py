"""A Muon variant with a state of its own, in one file: `python examples/variant_with_state.py`.

Each row of the polar factor is divided by the root of a running mean of its squares, with weights
that leave out what the zero start contributed, as in Adam:

    v_t = beta2 v_{t-1} + (1 - beta2) mean_j O_ij^2
    update_i = O_i / (sqrt(v_t / (1 - beta2^t)) + eps)

It keeps the dimension numbers and the sharding of the user: `omp.optimizer` hands them to links.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import optax_muonplus as omp
from optax_muonplus import transforms
from optax_muonplus.transforms import LeafInfo, MatrixLayout


class RowState(NamedTuple):
    """One number for each row of each matrix, and the number of updates."""

    nu: Any
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class ScaleByRows:
    """The link: `init` and `update` are told what each matrix is."""

    beta2: float = 0.9
    eps: float = 1e-6

    def init(self, params: Any, leaves: Sequence[LeafInfo]) -> RowState:
        """A zero for each row, where the row lies."""
        zeros = transforms.map_blocks(
            lambda layout, x: 0 * self.mean_squares(layout, x), leaves, params
        )
        return RowState(zeros, jnp.zeros([], jnp.int32))

    def update(
        self, updates: Any, state: RowState, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[Any, RowState]:
        """The divided rows, and the new state."""
        count = state.count + 1

        def rule(layout: MatrixLayout, o: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = self.beta2 * v + (1 - self.beta2) * self.mean_squares(layout, o)
            return o / (jnp.sqrt(v / (1 - self.beta2**count)) + self.eps), v

        updates, nu = transforms.map_blocks(rule, leaves, updates, state.nu, n_results=2)
        return updates, RowState(nu, count)

    def mean_squares(self, layout: MatrixLayout, x: jax.Array) -> jax.Array:
        """Over the inputs of each row; `layout` says which axes of `x` these are."""
        return jnp.mean(x.astype(jnp.float32) ** 2, axis=layout.reduction_axes, keepdims=True)


row_muon = omp.matrix_chain(
    omp.momentum(0.95),
    omp.orthogonalize(),
    ScaleByRows(),
    omp.scale_by_shape(consistent_rms=0.2),
)


if __name__ == "__main__":
    weights = {"dense": {"kernel": jnp.ones((16, 64)), "bias": jnp.zeros(64)}}  # 64 outputs of 16
    tx = omp.optimizer(row_muon, 0.02)
    print(jax.jit(tx.update)(weights, tx.init(weights), weights)[0])
