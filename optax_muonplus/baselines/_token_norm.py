r"""Momentum whose vectors, one for each token, have unit length: MuonIO's rule for tables.

Source: Ma et al., MuonIO, arXiv:2610.02705: of a head its rows, by the norm from 2 to infinity, and
of an embedding its columns, by the norm from 1 to 2. Its constants were not known here, and there
is no code.
"""

import dataclasses
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._sizes import divided, norm_over
from optax_muonplus.matrices import DECAY


@dataclasses.dataclass(frozen=True, eq=False)
class TokenNorm:
    r"""The vector of each token in a momentum, divided by its length.

    With :math:`B_t = \beta B_{t-1} + G_t` and the vector b of a token in it, the update is
    :math:`b / \|b\|`, and zero where b is zero. It is the step of steepest descent under the norm
    by which an embedding, or a head, acts on one token. It has the place of AdamW, for embeddings
    and heads: ``omp.optimizer(rule, 0.02, adamw=ByPath({"embed|head/kernel": TokenNorm(0.01)}))``.
    The state is one buffer, where AdamW has two. The longer of the last two axes numbers the
    tokens: nothing says how a table lies. A token that is in no batch keeps the direction of its
    last gradients, at full length.

    Attributes:
      learning_rate: number or schedule, the length of each token's step; None means that of the
        matrices.
      weight_decay: number or schedule.
      beta: decay of the momentum.
      nesterov: whether the momentum looks one step ahead.
    """

    learning_rate: optax.ScalarOrSchedule | None = None
    weight_decay: optax.ScalarOrSchedule = 0.0
    beta: ArrayLike = 0.95
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.learning_rate is not None:
            transforms.scale_by_learning_rate(self.learning_rate)
        transforms.add_decayed_weights(self.weight_decay)
        matrices.check_number("beta", self.beta, DECAY)
        matrices.check_flag("nesterov", self.nesterov)

    def transformation(self) -> optax.GradientTransformation:
        """Returns the chain, for a learning rate that is given."""
        rate: Any = self.learning_rate
        return optax.chain(
            optax.trace(self.beta, self.nesterov),
            optax.stateless(lambda updates, _: _of_unit_vectors(updates)),
            transforms.add_decayed_weights(self.weight_decay),
            transforms.scale_by_learning_rate(rate),
        )


def _of_unit_vectors(updates: Any) -> Any:
    paths, leaves, unflatten = transforms.flatten_tree(updates)
    for path, x in zip(paths, leaves, strict=True):
        if x.ndim < 2:
            raise ValueError(
                f"{'/'.join(path)} has the shape {x.shape}, and TokenNorm is for tables with a"
                " vector for each token. Choose the tables alone, as in ByPath({'head/kernel':"
                " TokenNorm()})."
            )
    return unflatten(map(_unit_vectors, leaves))


def _unit_vectors(x: jax.Array) -> jax.Array:
    y = matrices.upcast_for_sum(x)
    axis = -2 if y.shape[-2] < y.shape[-1] else -1
    y, _ = matrices.divide_by_pow2(y, abs(y).max(axis, keepdims=True))  # squares stay in range
    return divided(y, norm_over(y, (axis,))).astype(x.dtype)
