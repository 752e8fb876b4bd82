r"""Hyperball: any rule, with fixed Frobenius norms of matrices and updates.

Source: Wen et al., arXiv:2606.16899; code of its first author, KellerJordan/modded-nanogpt
@f411b3d, ``train_gpt_simple_muonh.py``, and marin-community/marin @05422e2, ``muonh.py``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

import optax_muonplus as omp
from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._sizes import divided, matrix_norm, norm_over
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import LeafInfo, Link, MatrixLayout, Momentum, Part


def scale_by_muon(
    momentum: Momentum = Momentum(), polar_factor: Orthogonalize = Orthogonalize()
) -> transforms.MatrixTransformation:
    """The matrix part of Muon without its factor by shape, which has no effect in Hyperball."""
    return omp.matrix_chain(momentum, polar_factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Hyperball(Link):
    r"""The last link of a chain: a step on the sphere of matrices with the same norm.

    For each matrix W, the update U of the links before, and :math:`R = \|W\|_F`:

    .. math::
      V = W - \eta R\, U / \|U\|_F, \qquad W \leftarrow R\, V / \|V\|_F

    It replaces weight decay and learning rate. The size of U has no effect, nor have factors by
    shape. R is the current norm of W, as in both codes. It differs from :math:`\|W_0\|_F` by
    rounding errors, which accumulate in bfloat16 parameters. The only state is the count of a
    schedule: MuonH has Muon's 4 mn bytes in float32. The step costs three sums over each matrix,
    which on a mesh are left to the compiler. An update needs the parameters. At init a matrix of
    zeros, which would stay zero, is an error unless it is traced.

    Attributes:
      learning_rate: number or schedule, in units of R: 0.014 to 0.02 in both codes. marin has
        sqrt(rate * decay), of a Muon with weight decay.
    """

    learning_rate: optax.ScalarOrSchedule
    makes_whole_steps = True

    def __post_init__(self) -> None:
        transforms.check_rate(self.learning_rate)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> optax.OptState:
        norms = jax.tree.leaves(transforms.map_blocks(matrix_norm, leaves, params))
        for leaf, norm in zip(leaves, norms, strict=True):
            check_not_zero(leaf.name, norm, "or leave it to AdamW by rules")
        return optax.scale_by_learning_rate(self.learning_rate).init(params)

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError("Hyperball needs the parameters: call update(grads, state, params).")
        rate = optax.scale_by_learning_rate(self.learning_rate)
        downhill, state = rate.update(jnp.ones([]), state)

        def step(layout: MatrixLayout, *block: jax.Array) -> jax.Array:
            return step_on_sphere(downhill, layout.matrix_axes, *block)

        return transforms.map_blocks(step, leaves, updates, params), state


def check_not_zero(name: str, norm: jax.Array, remedy: str) -> None:
    """Raises ValueError for a norm of zero, unless it is traced."""
    if not isinstance(norm, jax.core.Tracer) and jnp.any(norm == 0):
        raise ValueError(
            f"{name} has a matrix of zeros, whose norm would be kept. Give it random initial"
            f" values, {remedy}."
        )


def step_on_sphere(downhill: Any, axes: tuple[int, ...], u: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the step of ``w`` along ``u`` that keeps norms over ``axes``; ``downhill`` < 0."""
    u, w = matrices.upcast_for_sum(u), matrices.upcast_for_sum(w)
    # The size of u has no effect, but squares of large numbers would overflow.
    u, _ = matrices.divide_by_pow2(u, jnp.max(jnp.abs(u), axis=axes, keepdims=True))
    radius, length = norm_over(w, axes), norm_over(u, axes)
    v = w + matrices.as_real(downhill, radius.dtype) * divided(radius, length) * u
    return divided(radius, norm_over(v, axes)) * v - w


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    rule: Part = scale_by_muon(),
    *,
    others: optax.GradientTransformation | None = None,
    where: omp.Matrices | None = None,
    **fields: Any,
) -> optax.GradientTransformationExtraArgs:
    """Hyperball with a rule for the matrices, and NAdamW or ``others`` for other parameters.

    With Muon, the default ``rule``, this is MuonH; with ``NorMuon()`` it is NorMuonH. The matrices
    have no weight decay. marin's code has :func:`adamh` for the head.
    """
    chain = omp.matrix_chain(rule, Hyperball(learning_rate))
    others = transforms.nadamw(learning_rate) if others is None else others
    return omp.optimizer(chain, None, others=others, where=where, **fields)
