r"""Polar factors of matrices: plain functions on arrays ``(*batch, out, in)``.

For ``M = U S V^H`` the polar factor is ``U V^H``, the semi-orthogonal matrix closest to ``M``. The
input is first divided by its largest entry, so that the result is the same for ``c * M`` whatever
the size of ``c`` that its dtype can hold. A zero matrix gives zeros.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from optax_muonplus import coefficients
from optax_muonplus.matrices._precision import accumulation_dtype, scale_by_pow2, upcast_for_sum
from optax_muonplus.polar._newton_schulz import (
    Preconditioning,
    compiled_once,
    every_step,
    iterate,
    operations,
    product_shapes,
)

Polar = Literal["auto", "newton_schulz", "gram", "svd"]
PolarFunction = Callable[[jax.Array], jax.Array]

# Below any sum of squares that float32 gradients can make, above float32's smallest normal number.
DEFAULT_EPS = 1e-30


def polar_function(
    polar: Polar | PolarFunction = "auto",
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    eps: Any = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: Any = None,
) -> PolarFunction:
    """The function ``(*batch, out, in) -> (*batch, out, in)`` that the words ask for, validated.

    Args:
      polar: ``"newton_schulz"``, ``"gram"``, ``"svd"``, a function of the caller's own, or
        ``"auto"``: of the first two the one that does fewer operations for the shape, where
        products are exact enough for both.
      ns_coeffs: coefficients, for Newton-Schulz methods only, like all that follow; see
        :func:`newton_schulz`.
      ns_steps: number of steps.
      eps: added to the norm that divides.
      preconditioning: which norm divides.
      compute_dtype: dtype of the operands of products.

    Raises:
      ValueError: for an unknown word, too few rows, ``ns_steps < 1``, a negative ``eps``, a dtype
        that is not floating-point, or one that ``"gram"`` cannot use.
    """
    if callable(polar):
        return polar
    if polar not in get_args(Polar):
        raise ValueError(
            f"Unknown polar {polar!r}. Known: {', '.join(get_args(Polar))}; or a function"
            " (*batch, out, in) -> (*batch, out, in)."
        )
    if polar == "svd":
        return svd
    rows, steps, safety_factor, restarts, needs_float32 = coefficients.resolve(ns_coeffs, ns_steps)
    operand = _checked_dtype(compute_dtype)
    _check_numbers(eps, preconditioning)
    exact = needs_float32 or polar == "gram"
    if exact and not _holds_float32(operand):
        cause = f"ns_coeffs={ns_coeffs!r}" if needs_float32 else "polar='gram'"
        raise ValueError(
            f"{cause} diverges in products of less than float32, got compute_dtype={operand}. Leave"
            " that None, or pass polar='newton_schulz' with other coefficients, such as"
            " 'polar_express'."
        )
    options = {
        "rows": rows,
        "safety_factor": safety_factor,
        "eps": eps,
        "preconditioning": preconditioning,
        "compute_dtype": operand,
        "precision": jax.lax.Precision.HIGHEST if exact else None,
    }
    if polar == "gram":
        _check_gram(ns_steps, restarts)
        return functools.partial(iterate, restarts=restarts, **options)
    if polar == "auto" and restarts is not None:
        return functools.partial(_cheapest, restarts=restarts, **options)
    traced_steps = steps if restarts is None else None
    return functools.partial(iterate, restarts=every_step(rows), steps=traced_steps, **options)


def matmul_shapes(
    shape: Sequence[int],
    polar: Polar | PolarFunction = "auto",
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    compute_dtype: Any = None,
) -> list[tuple[int, int, int]]:
    """The matrix products that :func:`polar_function` does on one float32 matrix.

    Each is ``(rows, inner, columns)`` and takes ``2 * rows * inner * columns`` FLOPs. Methods other
    than Newton-Schulz count as five plain steps of it, which is their order of magnitude.

    Args:
      shape: ``(..., out, in)``; leading axes do not count.
      polar: as in :func:`polar_function`, like the others. ``"auto"`` is resolved for JAX's default
        backend.
      ns_coeffs: see above.
      ns_steps: see above.
      compute_dtype: see above.
    """
    if callable(polar) or polar == "svd":
        ns_coeffs, ns_steps, compute_dtype, polar = "jordan", 5, None, "newton_schulz"
    rows, _, _, restarts, needs_float32 = coefficients.resolve(ns_coeffs, ns_steps)
    exact = needs_float32 or _float32_is_exact() or jax.default_backend() == "cpu"
    either = polar == "auto" and exact and _holds_float32(_checked_dtype(compute_dtype))
    candidates = [] if polar == "gram" else [every_step(rows)]
    if restarts is not None and (polar == "gram" or either):
        candidates.append(restarts)
    chosen = min(candidates, key=lambda cuts: operations(tuple(shape), rows, cuts))
    return product_shapes(tuple(shape), rows, chosen)


def polar_flops(shape: Sequence[int], *args: Any) -> int:
    """FLOPs of the products in :func:`matmul_shapes`, whose arguments it takes."""
    return sum(2 * math.prod(dimensions) for dimensions in matmul_shapes(shape, *args))


def _checked_dtype(compute_dtype: Any) -> jnp.dtype | None:
    operand = None if compute_dtype is None else jnp.dtype(compute_dtype)
    if operand is not None and not jnp.issubdtype(operand, jnp.inexact):
        raise ValueError(f"compute_dtype must be a floating-point dtype, got {operand}.")
    return operand


def _check_numbers(eps: Any, preconditioning: str) -> None:
    if preconditioning not in get_args(Preconditioning):
        raise ValueError(
            f"Unknown preconditioning {preconditioning!r}."
            f" Known: {', '.join(get_args(Preconditioning))}."
        )
    if isinstance(eps, int | float) and eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}.")


def _check_gram(ns_steps: Any, restarts: Any) -> None:
    if restarts is None:
        raise ValueError(
            f"ns_steps={ns_steps} is traced, but polar='gram' plans its restarts for a given number"
            " of steps. Pass a Python int; under optax.inject_hyperparams add"
            " static_args=('ns_steps',). Or polar='newton_schulz'."
        )


def newton_schulz(
    x: jax.Array,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    *,
    eps: Any = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: Any = None,
) -> jax.Array:
    r"""Approximate polar factor by Newton-Schulz iteration.

    .. math::
      X \leftarrow M / (\nu(M) + \epsilon), \qquad
      X \leftarrow c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + \dots

    which sends each singular value s of the normalized matrix to ``p_T(...p_1(s))`` and leaves the
    singular vectors alone. The Gram matrix is taken over the shorter side.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      ns_coeffs: a table's name (``optax_muonplus.coefficients.TABLES``), one row, or several rows.
      ns_steps: number of steps; the first ``ns_steps`` rows of the table are used.
      eps: added to the norm that divides. The default leaves the result independent of scale; a
        larger one shrinks the update of matrices whose norm is comparable to it.
      preconditioning: the norm :math:`\nu`, which must bound the largest singular value by about 1:
        ``"frobenius"``; ``"spectral"``, exact, by an SVD; ``"schatten"``, the Schatten-4 norm
        :math:`\|X X^H\|_F^{1/2}`; ``"aol"``, a number for each unit of the shorter side (the input
        side of a square matrix; ``"aol_out"`` takes its output side),
        :math:`(\sum_j |X X^H|_{ij})^{1/2}`, which is no longer exactly the polar factor of the
        input but starts closer to one.
      compute_dtype: dtype of the matrix products' operands; they accumulate, and are combined, in
        float32 at least. None means the input's dtype, at least float32, at JAX's default matmul
        precision; ``"cans"``, which diverges in less than float32, asks for the highest and takes
        no narrower ``compute_dtype``.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: for an unknown name, too few rows, or ``ns_steps < 1``.

    Source: Jordan et al. 2024 (Muon); Boissin et al., arXiv:2512.04632 (aol); Grishina et al.,
    arXiv:2506.10935 (schatten).
    """
    function = polar_function(
        "newton_schulz", ns_coeffs, ns_steps, eps, preconditioning, compute_dtype
    )
    return function(x)


def gram_newton_schulz(
    x: jax.Array,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: int = 5,
    *,
    eps: Any = DEFAULT_EPS,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: Any = None,
) -> jax.Array:
    r"""The same polynomial as :func:`newton_schulz`, iterated on the Gram matrix.

    With :math:`R_0 = X X^H` for the shorter side n,

    .. math::
      P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad R_{i+1} = R_i P_i^2, \qquad
      \text{result} = (P_{T-1} \cdots P_0) X

    touches the longer side m twice instead of 2 T times: 4 n^2 m + 2 n^3 (4T - 3) operations in
    place of T (4 n^2 m + 2 n^3), fewer where m > 1.5 n. Tables that would let rounding errors in R
    grow take R anew once or twice on the way (``coefficients.resolve(...).restarts``).

    Products are made at the highest precision that the device has for float32: at less (TF32,
    bfloat16) the iteration may diverge.

    Args:
      x: as in :func:`newton_schulz`, like the others.
      ns_coeffs: see above.
      ns_steps: number of steps, a Python int.
      eps: see above.
      preconditioning: see above.
      compute_dtype: None, or float32 at least.

    Raises:
      ValueError: as :func:`newton_schulz`, for a traced ``ns_steps`` and a narrower
        ``compute_dtype``.

    Source: Dao-AILab, gram-newton-schulz (2026).
    """
    return polar_function("gram", ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)(x)


@compiled_once
def _cheapest(
    x: jax.Array,
    *,
    rows: tuple[coefficients.Row, ...],
    restarts: tuple[int, ...],
    compute_dtype: jnp.dtype | None,
    precision: jax.lax.Precision | None,
    **options: Any,
) -> jax.Array:
    """Plain or Gram Newton-Schulz, whichever does fewer operations at sufficient precision."""
    highest = jax.lax.Precision.HIGHEST
    both = functools.partial(iterate, rows=rows, compute_dtype=compute_dtype, **options)
    plain = functools.partial(both, restarts=every_step(rows), precision=precision)
    gram = functools.partial(both, restarts=restarts, precision=highest)
    fewer = operations(x.shape, rows, restarts) < operations(x.shape, rows, every_step(rows))
    if not fewer or not _holds_float32(compute_dtype):
        return plain(x)
    if (
        precision == highest
        or accumulation_dtype(x.dtype) in (jnp.float64, jnp.complex128)
        or _float32_is_exact()
    ):
        return gram(x)
    # Elsewhere float32 products are TF32 or bfloat16 by default and several times as fast as the
    # exact ones that the Gram iteration needs.
    return jax.lax.platform_dependent(x, cpu=gram, default=plain)


def _float32_is_exact() -> bool:
    """Whether JAX is told to make float32 products as such on every device."""
    precision = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    return precision in ("highest", "float32")


def _holds_float32(compute_dtype: jnp.dtype | None) -> bool:
    return compute_dtype is None or jnp.finfo(compute_dtype).nmant >= jnp.finfo(jnp.float32).nmant


def svd(x: jax.Array) -> jax.Array:
    """Exact polar factor ``U V^H`` from the singular value decomposition.

    Singular values at rounding level count as zero and stay zero, as they do under Newton-Schulz:
    a matrix of lower rank gives the partial isometry, not an arbitrary completion of it.

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
