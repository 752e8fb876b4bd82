r"""Polar factors of matrices: plain functions on arrays ``(*batch, out, in)``.

For ``M = U S V^H`` the polar factor is ``U V^H``, the semi-orthogonal matrix closest to ``M``. The
input is first divided by its largest entry, so that the result is the same for ``c * M`` whatever
the size of ``c`` that its dtype can hold. A zero matrix gives zeros.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus import coefficients
from optax_muonplus.precision import accumulable, accumulation_dtype, as_real, sum_of_squares

Polar = Literal["auto", "newton_schulz", "svd"]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]
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
      polar: ``"newton_schulz"``, ``"svd"``, a function of the caller's own, or ``"auto"``: the
        cheapest of the library's Newton-Schulz methods for the shape.
      ns_coeffs: coefficients, for Newton-Schulz methods only, like all that follow; see
        :func:`newton_schulz`.
      ns_steps: number of steps.
      eps: added to the norm that divides.
      preconditioning: which norm divides.
      compute_dtype: dtype of the operands of products.

    Raises:
      ValueError: for an unknown word, too few rows, ``ns_steps < 1``, a negative ``eps`` or a dtype
        that is not floating-point.
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
    return _newton_schulz_function(ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)


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
        side of a square matrix), :math:`(\sum_j |X X^H|_{ij})^{1/2}`, which is no longer exactly
        the polar factor of the input but starts closer to one.
      compute_dtype: dtype of the matrix products' operands; they accumulate, and are combined, in
        float32 at least. None means the input's dtype, at least float32, at JAX's default matmul
        precision.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: for an unknown name, too few rows, or ``ns_steps < 1``.

    Source: Jordan et al. 2024 (Muon); Boissin et al., arXiv:2512.04632 (aol); Grishina et al.,
    arXiv:2506.10935 (schatten).
    """
    return _newton_schulz_function(ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)(x)


def _newton_schulz_function(
    ns_coeffs: str | Sequence[Any],
    ns_steps: Any,
    eps: Any,
    preconditioning: Preconditioning,
    compute_dtype: Any,
) -> PolarFunction:
    """:func:`newton_schulz` with its arguments checked and its rows looked up."""
    rows, steps, headroom = coefficients.resolve(ns_coeffs, ns_steps)
    if preconditioning not in get_args(Preconditioning):
        raise ValueError(
            f"Unknown preconditioning {preconditioning!r}."
            f" Known: {', '.join(get_args(Preconditioning))}."
        )
    if isinstance(eps, int | float) and eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}.")
    operand = None if compute_dtype is None else jnp.dtype(compute_dtype)
    if operand is not None and not jnp.issubdtype(operand, jnp.inexact):
        raise ValueError(f"compute_dtype must be a floating-point dtype, got {operand}.")
    return functools.partial(
        _newton_schulz,
        eps=eps,
        steps=None if isinstance(steps, int) else steps,
        rows=rows,
        headroom=headroom,
        preconditioning=preconditioning,
        compute_dtype=operand,
    )


# Compiled once for each shape also where the caller is not under jit: a loop outside of one would
# be compiled anew at every call.
@functools.partial(
    jax.jit, static_argnames=("rows", "headroom", "preconditioning", "compute_dtype")
)
def _newton_schulz(
    x: jax.Array,
    *,
    eps: Any,
    steps: Any,
    rows: tuple[coefficients.Row, ...],
    headroom: float,
    preconditioning: Preconditioning,
    compute_dtype: Any,
) -> jax.Array:
    """:func:`newton_schulz` with the rows looked up; ``steps=None`` means one for each row."""
    dtype = _product_dtype(accumulation_dtype(x.dtype), compute_dtype)
    product = _product(dtype, compute_dtype)
    # The shorter side; a square matrix counts as the input side, as optax.contrib.muon has it.
    left = x.shape[-2] < x.shape[-1]

    def gram(y: jax.Array) -> jax.Array:
        return product(y, _adjoint(y)) if left else product(_adjoint(y), y)

    def step(y: jax.Array, square: jax.Array, row: Any) -> jax.Array:
        factor = row[-1] * square
        for c in row[-2:0:-1]:
            factor = product(square, factor) + c * square
        return row[0] * y + (product(factor, y) if left else product(y, factor))

    y, magnitude = _unit_max(x.astype(dtype))
    floor = as_real(eps, magnitude.dtype) / magnitude
    y, square = _precondition(y, gram, left, headroom, floor, preconditioning)
    y = step(y, square, rows[0])
    table = np.asarray(rows, magnitude.dtype)

    def body(i: Any, y: jax.Array) -> jax.Array:
        row = jnp.asarray(table)[jnp.minimum(i, len(rows) - 1)]
        return step(y, gram(y), tuple(row))

    # A loop, not an unrolled chain: temporary memory must not grow with the number of steps.
    y = jax.lax.fori_loop(1, len(rows) if steps is None else steps, body, y)
    return y.astype(x.dtype)


def svd(x: jax.Array) -> jax.Array:
    """Exact polar factor ``U V^H`` from the singular value decomposition.

    Singular values at rounding level count as zero and stay zero, as they do under Newton-Schulz:
    a matrix of lower rank gives the partial isometry, not an arbitrary completion of it.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.

    Returns:
      An array of ``x``'s shape and dtype, computed in float32 at least.
    """
    y, _ = _unit_max(accumulable(x))
    u, s, vh = jnp.linalg.svd(y, full_matrices=False)
    tolerance = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    kept = (s > tolerance * s[..., :1]).astype(u.dtype)
    return jnp.matmul(u * kept[..., None, :], vh).astype(x.dtype)


def _product_dtype(dtype: jnp.dtype, compute_dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of sums and combinations, for matrices of ``dtype``."""
    if compute_dtype is None:
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating) != jnp.issubdtype(
        compute_dtype, jnp.complexfloating
    ):
        raise ValueError(
            f"compute_dtype={compute_dtype} does not go with matrices of dtype {dtype}: real"
            " products for real parameters, complex ones for complex. None serves both."
        )
    return jnp.promote_types(dtype, compute_dtype)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _product(dtype: jnp.dtype, operand: Any) -> Callable[..., jax.Array]:
    """A matrix product with operands rounded to ``operand`` and the result in ``dtype``."""
    if operand is None or operand == dtype:
        return jnp.matmul

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a.astype(operand), b.astype(operand), preferred_element_type=dtype)

    def rounded(a: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(a):
            return a.astype(operand).astype(dtype)
        info = jnp.finfo(operand)  # a pair of casts would be optimized away
        return jax.lax.reduce_precision(a, info.nexp, info.nmant)

    def emulated(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(rounded(a), rounded(b))

    # XLA's CPU runtime has no product of narrow operands with a wide result (jaxlib 0.10: "DotThunk
    # BF16 x BF16 = F32"); the same product of the same rounded numbers in the wide dtype it has.
    return functools.partial(jax.lax.platform_dependent, cpu=emulated, default=narrow)


def _unit_max(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x`` over about its largest magnitude, and that magnitude ``(*batch, 1, 1)`` (1 for zero).

    Squares of what is left neither overflow nor vanish as a whole.
    """
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    # XLA may multiply by the reciprocal, which must not be a subnormal number: those count as 0.
    magnitude = jnp.clip(jnp.where(largest > 0, largest, 1), max=jnp.finfo(largest.dtype).max / 8)
    return x / magnitude, magnitude


def _precondition(
    y: jax.Array,
    gram: Callable[[jax.Array], jax.Array],
    left: bool,
    headroom: float,
    eps: jax.Array,
    preconditioning: Preconditioning,
) -> tuple[jax.Array, jax.Array]:
    """``y`` over its norm, and the Gram matrix of that: two norms are read off the Gram matrix."""

    def over(norm: jax.Array) -> jax.Array:
        # The norm is 0 for a zero matrix, and for a zero row under aol, whatever eps is.
        return jnp.where(norm > 0, 1 / jnp.where(norm > 0, headroom * norm + eps, 1), 0)

    if preconditioning == "frobenius":
        y = y * over(jnp.sqrt(sum_of_squares(y, (-2, -1))))
        return y, gram(y)
    if preconditioning == "spectral":
        y = y * over(jnp.linalg.norm(y, ord=2, axis=(-2, -1), keepdims=True))
        return y, gram(y)
    square = gram(y)
    if preconditioning == "schatten":
        scale = over(sum_of_squares(square, (-2, -1)) ** 0.25)
        return y * scale, square * scale**2
    scale = over(jnp.sqrt(jnp.sum(jnp.abs(square), axis=-1, keepdims=True)))
    other = jnp.swapaxes(scale, -1, -2)
    return y * (scale if left else other), square * scale * other
