"""The exact polar factor."""

import jax.numpy as jnp

from optax_muonplus.matrices import scale_by_pow2, upcast_for_sum
from optax_muonplus.method import check_matrices
from optax_muonplus.polar._products import Matrices


def svd(x: Matrices) -> Matrices:
    """Returns exact polar factors ``U V^H`` from the singular value decomposition ``U S V^H``.

    Singular values at rounding level count as zero and stay zero, as under Newton-Schulz. A matrix
    of lower rank therefore gives the partial isometry, not an arbitrary completion of it. Its
    derivatives are those of ``jnp.linalg.svd``: NaN where singular values are equal, as those of a
    zero matrix are. Newton-Schulz has the derivative 0 at a zero matrix.

    Args:
      x: matrices, real or complex.

    Returns:
      An array of ``x``'s shape and dtype, computed in float32 at least.

    Raises:
      ValueError: for ``x`` that is no array of two axes at least or is not floating-point.
    """
    check_matrices(x)
    y, _ = scale_by_pow2(upcast_for_sum(x))
    u, s, vh = jnp.linalg.svd(y, full_matrices=False)
    tolerance = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    kept = (s > tolerance * s[..., :1]).astype(u.dtype)
    return jnp.matmul(u * kept[..., None, :], vh).astype(x.dtype)
