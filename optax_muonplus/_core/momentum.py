r"""The momentum of a matrix, and the paper's update.

.. math::
  M \leftarrow \beta M + (1 - \beta) G, \qquad
  O = \mathrm{Norm}(\mathrm{Ortho}(\beta M + (1 - \beta) G)), \qquad
  W \leftarrow W - \eta \left( \sqrt{m/n}\, O + \lambda W \right)

Source: Zhang et al., Muon+, arXiv:2602.21545, Algorithm 1 and its code, K1seki221/MuonPlus.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .function import MatrixArray, MatrixFunction
from .normalize import Normalize
from .orthogonalize import Orthogonalize
from .precision import accumulation_dtype, as_real
from .scale import ScaleByShape

ORTHOGONALIZE, NORMALIZE, SCALE = Orthogonalize(), Normalize(), ScaleByShape()


def muon_plus(
    gradient: MatrixArray,
    momentum: MatrixArray,
    beta: ArrayLike = 0.95,
    *,
    nesterov: bool = True,
    orthogonalize: MatrixFunction = ORTHOGONALIZE,
    normalize: MatrixFunction = NORMALIZE,
    scale: MatrixFunction = SCALE,
) -> tuple[MatrixArray, MatrixArray]:
    r"""Returns the update of matrices at learning rate 1, and their new momentum.

    Args:
      gradient: G, ``(*batch, out, in)``.
      momentum: M before the update, zeros at first.
      beta: :math:`\beta`, in [0, 1).
      nesterov: whether to orthogonalize :math:`\beta M + (1 - \beta) G`, as in the paper's code, or
        M, as in its equation.
      orthogonalize: Ortho.
      normalize: Norm.
      scale: the factor by shape; the default is :math:`\sqrt{\max(1, m/n)}`, not the paper's.
    """
    momentum = moving_average(momentum, gradient, beta)
    x = look_ahead(momentum, gradient if nesterov else None, beta)
    for function in (orthogonalize, normalize, scale):
        x = function(x)
    return x, momentum


def moving_average(momentum: jax.Array, gradient: jax.Array, beta: ArrayLike) -> jax.Array:
    """Returns ``beta M + (1 - beta) G``, in float32 at least."""
    dtype = _sum_dtype(momentum, gradient)
    beta = as_real(beta, jnp.finfo(dtype).dtype)
    return beta * momentum.astype(dtype) + (1 - beta) * gradient.astype(dtype)


def look_ahead(
    momentum: jax.Array, gradient: jax.Array | None, beta: ArrayLike, count: Any = None
) -> jax.Array:
    r"""Returns the matrices to orthogonalize, in float32 at least.

    .. math::
      \beta M_t / (1 - \beta^{t+1}) + (1 - \beta) G_t / (1 - \beta^t)

    Without a gradient: :math:`M_t / (1 - \beta^t)`. ``count`` is t, or None for no correction.
    """
    dtype = _sum_dtype(momentum, momentum if gradient is None else gradient)
    beta = as_real(beta, jnp.finfo(dtype).dtype)

    # Weights are divided first: a large gradient divided by 1 - beta would overflow.
    def corrected(weight: Any, later: int) -> Any:
        return weight / (1 if count is None else 1 - beta ** (count + later))

    if gradient is None:
        return corrected(1.0, 0) * momentum.astype(dtype)
    ahead = corrected(beta, 1) * momentum.astype(dtype)
    return ahead + corrected(1 - beta, 0) * gradient.astype(dtype)


def _sum_dtype(momentum: jax.Array, gradient: jax.Array) -> jnp.dtype:
    return accumulation_dtype(jnp.promote_types(momentum.dtype, gradient.dtype))
