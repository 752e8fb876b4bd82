r"""Momentum over its own size: what MeqMuon has for parameters that are not matrices.

Source: Shi, Wang and Li, arXiv:2609.35701, equations 9 to 14.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._sizes import RMS, divided
from optax_muonplus.matrices import DECAY, POSITIVE

LEAST = 1e-7  # a row or column whose root mean square is not above it counts as zero
_VECTOR = re.compile("(?i)(bias|scale|offset|gain|gamma|beta)$")


@dataclasses.dataclass(frozen=True, eq=False)
class NormalizedMomentum:
    r"""What MeqMuon has in place of AdamW: one buffer for each parameter in place of two.

    With :math:`B_t = \beta B_{t-1} + G_t`, a vector gets the update :math:`\rho B_t` over its root
    mean square. Of a table, such as an embedding or a head, all rows get the root mean square 1,
    and after that all columns do, and the update is :math:`\rho` times this. The longer of the last
    two axes numbers the rows, as the vocabulary does in the paper: nothing says how a table lies.
    Biases and scales are vectors along their last axis, so that each head's or layer's is one.

    Attributes:
      learning_rate: number or schedule; None means that of the matrices.
      weight_decay: number or schedule; None means 0, and under :func:`meqmuon` the matrices'.
      beta: decay of the momentum, which does not look ahead.
      rms: :math:`\rho`.
    """

    learning_rate: optax.ScalarOrSchedule | None = None
    weight_decay: optax.ScalarOrSchedule | None = None
    beta: ArrayLike = 0.95
    rms: ArrayLike = RMS

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        matrices.check_number("beta", self.beta, DECAY)
        matrices.check_number("rms", self.rms, POSITIVE)
        if self.learning_rate is not None:
            transforms.scale_by_learning_rate(self.learning_rate)
        self._decay()

    def transformation(self) -> optax.GradientTransformation:
        """Returns the chain, for a learning rate that is given."""
        rate: Any = self.learning_rate
        return optax.chain(
            optax.trace(self.beta),
            optax.stateless(lambda updates, _: self._normalized(updates)),
            self._decay(),
            transforms.scale_by_learning_rate(rate),
        )

    def _decay(self) -> optax.GradientTransformation:
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        return transforms.add_decayed_weights(decay)

    def _normalized(self, updates: optax.Updates) -> optax.Updates:
        paths, leaves, unflatten = transforms.flatten_tree(updates)
        return unflatten(
            _normalized(x, self.rms, is_vector=x.ndim < 2 or bool(_VECTOR.search("/".join(path))))
            for path, x in zip(paths, leaves, strict=True)
        )


def _normalized(x: jax.Array, rms: ArrayLike, is_vector: bool) -> jax.Array:
    """Returns the update of a momentum: vectors along the last axis, or tables of the last two."""
    y = matrices.upcast_for_sum(x).reshape(x.shape or (1,))
    # Rows lie along the shorter axis, and come first.
    wide = not is_vector and x.shape[-2] < x.shape[-1]
    for axis in [-1] if is_vector else [-2, -1] if wide else [-1, -2]:
        y = divided(y, rms_along(y, axis), LEAST)
    return (matrices.as_real(rms, jnp.finfo(y.dtype).dtype) * y).reshape(x.shape).astype(x.dtype)


def rms_along(x: jax.Array, axis: int) -> jax.Array:
    """Returns root mean squares along an axis, which remains with size 1."""
    return matrices.root(matrices.sum_of_squares(x, (axis,)) / x.shape[axis])
