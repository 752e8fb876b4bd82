r"""Hyperball: any rule, with the Frobenius norms of matrices and of their updates held fixed.

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
from optax_muonplus.contrib._sizes import divided, matrix_axes, matrix_norm, norm_over
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import LeafInfo, Link, MatrixLayout, Momentum, Part


def scale_by_muon(
    momentum: Momentum = Momentum(), polar_factor: Orthogonalize = Orthogonalize()
) -> transforms.MatrixTransformation:
    """The matrix part of Muon without its factor by shape, of which Hyperball sees nothing."""
    return omp.matrix_chain(momentum, polar_factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Hyperball(Link):
    r"""The last link of a chain: a step on the sphere of matrices of one norm.

    For each matrix W, the update U of the links before, and :math:`R = \|W\|_F`:

    .. math::
      V = W - \eta R\, U / \|U\|_F, \qquad W \leftarrow R\, V / \|V\|_F

    It takes the place of weight decay and learning rate. The size of U, and factors by shape, have
    no effect. R is the norm that W has, as in both codes, not a stored :math:`\|W_0\|_F`: the two
    differ by rounding, which bfloat16 parameters add up. There is no state but the count of a
    schedule: MuonH has Muon's 4 mn bytes in float32. It costs three sums over each matrix more than
    Muon, which on a mesh are left to the compiler. An update needs the parameters. A matrix of
    zeros, which would stay zero, is refused at init unless it is traced.

    Attributes:
      learning_rate: number or schedule, in units of R: 0.014 to 0.02 in both codes. marin takes the
        root of rate times decay of a Muon with weight decay.
    """

    learning_rate: optax.ScalarOrSchedule
    makes_whole_steps = True

    def __post_init__(self) -> None:
        """Raises ValueError unless the rate is a number, not negative, or a schedule."""
        transforms.check_rate(self.learning_rate)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> optax.OptState:
        """Returns the state of the learning rate."""
        norms = jax.tree.leaves(transforms.map_blocks(matrix_norm, leaves, params))
        for leaf, norm in zip(leaves, norms, strict=True):
            check_not_zero(leaf.name, norm, "or leave it to AdamW by rules")
        return optax.scale_by_learning_rate(self.learning_rate).init(params)

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates and the new state."""
        if params is None:
            raise ValueError("Hyperball needs the parameters: call update(grads, state, params).")
        rate = optax.scale_by_learning_rate(self.learning_rate)
        downhill, state = rate.update(jnp.ones([]), state)

        def step(layout: MatrixLayout, *block: jax.Array) -> jax.Array:
            return step_on_sphere(downhill, matrix_axes(layout), *block)

        return transforms.map_blocks(step, leaves, updates, params), state


def check_not_zero(name: str, norm: jax.Array, remedy: str) -> None:
    """Raises ValueError for a norm of zero, which would be kept; a traced one is not looked at."""
    if not isinstance(norm, jax.core.Tracer) and jnp.any(norm == 0):
        raise ValueError(
            f"{name} has a matrix of zeros, whose norm would be kept. Give it random initial"
            f" values, {remedy}."
        )


def step_on_sphere(downhill: Any, axes: tuple[int, ...], u: jax.Array, w: jax.Array) -> jax.Array:
    """Returns what is added to ``w``, whose norms over ``axes`` are kept.

    Args:
      downhill: the negative learning rate.
      axes: of a matrix.
      u: the update, before it gets the norm of ``w``.
      w: the parameter.
    """
    u, w = matrices.upcast_for_sum(u), matrices.upcast_for_sum(w)
    # The rule sees no size of u; squares of large numbers would overflow.
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
    """Hyperball around a rule on the matrices, NAdamW or ``others`` on everything else.

    ``rule`` is Muon by default, which makes it MuonH; with ``NorMuon()`` it is NorMuonH. The
    matrices have no weight decay. marin's code has :func:`adamh` for the head.
    """
    chain = omp.matrix_chain(rule, Hyperball(learning_rate))
    others = transforms.nadamw(learning_rate) if others is None else others
    return omp.optimizer(chain, None, others=others, where=where, **fields)
