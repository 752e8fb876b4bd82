"""The two forms of Newton-Schulz as functions on arrays."""

import dataclasses

from optax_muonplus.polar._orthogonalize import DEFAULT, Orthogonalize
from optax_muonplus.polar._products import Matrices


def newton_schulz(x: Matrices, options: Orthogonalize = DEFAULT) -> Matrices:
    """Returns approximate polar factors by the plain Newton-Schulz iteration.

    Args:
      x: matrices, real or complex.
      options: coefficients, steps and precision; its ``polar`` does not count.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: if one of ``x`` and ``options.compute_dtype`` is real and the other complex, and
        for ``x`` that is no array of two axes at least or is not floating-point.
    """
    return dataclasses.replace(options, polar="newton_schulz")(x)


def gram_newton_schulz(x: Matrices, options: Orthogonalize = DEFAULT) -> Matrices:
    r"""Returns the same polynomial as :func:`newton_schulz`, iterated on the Gram matrix.

    With :math:`R_0 = X X^H` for the shorter side n,

    .. math::
      P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad R_{i+1} = R_i P_i^2, \qquad
      \text{result} = (P_{T-1} \cdots P_0) X

    This multiplies with the longer side m twice instead of 2 T times. It takes 4 n^2 m + 2 n^3
    (4T - 3) operations instead of T (4 n^2 m + 2 n^3), which is fewer if m > 1.5 n; rows of two
    coefficients take 2 n^3 T fewer in both forms. For some tables rounding errors in R would grow:
    these compute R again from X once or twice (``coefficients.resolve(...).restarts``).

    In TF32 the iteration may diverge. Float32 products are therefore exact on a CPU, and three
    products of bfloat16 parts on accelerators (``BF16_BF16_F32_X3``), unless
    ``jax_default_matmul_precision`` asks for exact ones. Half precision needs more restarts.
    Float16 is then nearer to the polynomial than the plain iteration in bfloat16. Bfloat16 is as
    near as that, for the tables that have such restarts: ``"jordan"`` with 5 or 6 steps, ``"you"``
    and ``"dion"`` with 5, ``"turbo"`` with 4, ``"cubic"`` with 4 to 8.

    Args:
      x: matrices, real or complex.
      options: coefficients of a published table, a Python int of steps, and precision; its
        ``polar`` does not count.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: as for :func:`newton_schulz`; and for coefficients of your own, steps beyond those
        that are listed, a traced ``ns_steps``, or a ``compute_dtype`` of bfloat16 with a table that
        has no restarts for it.

    Source: Dao-AILab, gram-newton-schulz (2026).
    """
    return dataclasses.replace(options, polar="gram")(x)
