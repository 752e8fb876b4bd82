r"""Polar factors by Newton-Schulz iteration, plain or on the Gram matrix, and by an SVD.

All functions take arrays ``(*batch, out, in)`` and divide each matrix by a power of two near its
largest entry first, so that neither large nor small matrices leave the range of their dtype.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus import coefficients
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.matrices._precision import scale_by_pow2, upcast_for_sum
from optax_muonplus.polar._choice import choose_forms, iterate_in_form
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import (
    DEFAULT_EPS,
    Polar,
    PolarFunction,
    check_bounded,
    check_eps,
    check_operand,
    check_polar,
    check_preconditioning,
    operand_dtype,
)
from optax_muonplus.polar._symmetric_product import check_symmetric_kernel


def polar_function(
    polar: Polar | PolarFunction = "auto",
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    eps: ArrayLike = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
) -> PolarFunction:
    """The function ``(*batch, out, in) -> (*batch, out, in)`` that these options choose.

    Args:
      polar: ``"newton_schulz"``, ``"gram"``, ``"svd"``, or a function of the caller's own, which is
        returned as it is. ``"auto"`` takes, of the first two, the one that does fewer operations
        for the shape, if products are exact enough for both.
      ns_coeffs: coefficients, as in :func:`newton_schulz`. They and all that follow are for the
        Newton-Schulz methods only.
      ns_steps: number of steps.
      eps: added to the norm that divides.
      preconditioning: the norm that divides.
      compute_dtype: dtype of the operands of products.
      symmetric_kernel: as in :func:`newton_schulz`.

    Raises:
      ValueError: for an unknown option, too few rows, ``ns_steps < 1``, a negative ``eps``, a dtype
        that is not floating-point, or one that ``"gram"`` or ``symmetric_kernel`` cannot use.
    """
    operand = operand_dtype(compute_dtype)
    check_preconditioning(preconditioning)
    check_eps(eps)
    check_symmetric_kernel(symmetric_kernel, polar, operand)
    if callable(polar):
        return polar
    check_polar(polar)
    if polar == "svd":
        return svd
    chosen = coefficients.resolve(ns_coeffs, ns_steps)
    check_bounded(ns_coeffs, chosen)
    check_operand(polar, ns_coeffs, chosen, operand)
    traced = chosen.restarts is None
    if polar == "gram" and traced:
        raise ValueError(
            f"ns_steps={ns_steps} is traced, but polar='gram' plans its restarts for a given number"
            " of steps. Pass a Python int; under optax.inject_hyperparams add"
            " static_args=('ns_steps',). Or polar='newton_schulz'."
        )

    def function(x: jax.Array) -> jax.Array:
        return iterate_in_form(
            x,
            eps=eps,
            steps=chosen.steps if traced else None,
            forms=choose_forms(x.shape, x.dtype, polar, chosen, operand),
            rows=chosen.rows,
            safety_factor=chosen.safety_factor,
            preconditioning=preconditioning,
            compute_dtype=operand,
            symmetric_kernel=symmetric_kernel,
        )

    return function


def newton_schulz(
    x: jax.Array,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    *,
    eps: ArrayLike = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
) -> jax.Array:
    r"""Approximate polar factor by Newton-Schulz iteration.

    .. math::
      X \leftarrow M / (\nu(M) + \epsilon), \qquad
      X \leftarrow c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + \dots

    Each singular value s of the normalized matrix becomes ``p_T(...p_1(s))``, where ``p_t(s) = c_0
    s + c_1 s^3 + c_2 s^5 + ...`` has the coefficients of step t. Singular vectors stay the same.
    The Gram matrix is taken over the shorter side.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      ns_coeffs: a table's name (``optax_muonplus.coefficients.TABLES``), one row, or several rows.
      ns_steps: number of steps; the first ``ns_steps`` rows of the table are used.
      eps: added to the norm that divides. With the default the result does not depend on the scale
        of ``x``; a larger one shrinks the update of matrices whose norm is comparable to it.
      preconditioning: the norm :math:`\nu`, which must bound the largest singular value by about 1:

        - ``"frobenius"``: the Frobenius norm.
        - ``"spectral"``: the largest singular value, by an SVD.
        - ``"schatten"``: the Schatten-4 norm :math:`\|X X^H\|_F^{1/2}`.
        - ``"aol"``: one number for each unit of the shorter side, :math:`(\sum_j |X
          X^H|_{ij})^{1/2}`. The result is no longer exactly the polar factor of the input, but the
          iteration starts closer to one. Of a square matrix it scales the input side.
        - ``"aol_out"``: the same, but of a square matrix it scales the output side.
      compute_dtype: dtype of the operands and results of matrix products. Products are summed, and
        polynomials combined, in float32 at least; results are rounded once. None means the input's
        dtype, at least float32, at JAX's default matmul precision. ``"cans"`` diverges in less
        than float32: it uses the precision of :func:`gram_newton_schulz`, and rejects a narrower
        ``compute_dtype``. Float16 is for GPUs; TPUs have no unit for it and emulate it slowly.
      symmetric_kernel: on Hopper GPUs (compute capability 9.0) computes products whose result is
        symmetric, which are two of three on square matrices, as one triangle, by
        :func:`symmetric_product`. Needs a ``compute_dtype`` of bfloat16 or float16 and JAX 0.11,
        and has an effect for real matrices with a shorter side of 512 at least, on one device or
        inside ``jax.shard_map``. Elsewhere products stay plain. Off by default: the kernel was
        compiled for Hopper, and has never run there.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: for an unknown option, too few rows, ``ns_steps < 1``, a negative ``eps``, a
        ``compute_dtype`` that is not floating-point, or a ``symmetric_kernel`` without half
        precision or with an older JAX.

    Source: Jordan et al. 2024 (Muon); Boissin et al., arXiv:2512.04632 (aol); Grishina et al.,
    arXiv:2506.10935 (schatten).
    """
    options = (ns_coeffs, ns_steps, eps, preconditioning, compute_dtype, symmetric_kernel)
    return polar_function("newton_schulz", *options)(x)


def gram_newton_schulz(
    x: jax.Array,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int = 5,
    *,
    eps: ArrayLike = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
) -> jax.Array:
    r"""The same polynomial as :func:`newton_schulz`, iterated on the Gram matrix.

    With :math:`R_0 = X X^H` for the shorter side n,

    .. math::
      P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad R_{i+1} = R_i P_i^2, \qquad
      \text{result} = (P_{T-1} \cdots P_0) X

    This multiplies with the longer side m twice instead of 2 T times. It takes 4 n^2 m + 2 n^3
    (4T - 3) operations instead of T (4 n^2 m + 2 n^3), which is fewer if m > 1.5 n. For some tables
    rounding errors in R would grow: these compute R again from X once or twice
    (``coefficients.resolve(...).restarts``).

    In TF32 the iteration may diverge. Float32 products are therefore exact on a CPU, and three
    products of bfloat16 parts on accelerators (``BF16_BF16_F32_X3``), unless
    ``jax_default_matmul_precision`` asks for exact ones. Half precision needs more restarts.
    Float16 is then nearer to the polynomial than the plain iteration in bfloat16. Bfloat16 is as
    near as that, for the tables that have such restarts: ``"jordan"`` with 5 or 6 steps, ``"you"``
    and ``"dion"`` with 5, ``"turbo"`` with 4.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      ns_coeffs: as in :func:`newton_schulz`.
      ns_steps: number of steps, a Python int.
      eps: as in :func:`newton_schulz`.
      preconditioning: as in :func:`newton_schulz`.
      compute_dtype: as in :func:`newton_schulz`.
      symmetric_kernel: as in :func:`newton_schulz`.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: as for :func:`newton_schulz`; and for a traced ``ns_steps``, or a
        ``compute_dtype`` of bfloat16 with a table that has no restarts for it.

    Source: Dao-AILab, gram-newton-schulz (2026).
    """
    options = (ns_coeffs, ns_steps, eps, preconditioning, compute_dtype, symmetric_kernel)
    return polar_function("gram", *options)(x)


def svd(x: jax.Array) -> jax.Array:
    """Exact polar factor ``U V^H`` from the singular value decomposition ``U S V^H``.

    Singular values at rounding level count as zero and stay zero, as under Newton-Schulz. A matrix
    of lower rank therefore gives the partial isometry, not an arbitrary completion of it.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.

    Returns:
      An array of ``x``'s shape and dtype, computed in float32 at least.
    """
    y, _ = scale_by_pow2(upcast_for_sum(x))
    u, s, vh = jnp.linalg.svd(y, full_matrices=False)
    tolerance = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    kept = (s > tolerance * s[..., :1]).astype(u.dtype)
    return jnp.matmul(u * kept[..., None, :], vh).astype(x.dtype)
