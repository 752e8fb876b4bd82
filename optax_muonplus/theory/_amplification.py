r"""Which singular values a Newton-Schulz step drives apart: the paper's section on amplification.

A step maps a singular value x to :math:`\varphi(x) = c_0 x + c_1 x^3 + c_2 x^5 + \dots` and an
eigenvalue :math:`\lambda = x^2` to :math:`g(\lambda) = \varphi(\sqrt\lambda)^2`. Where
:math:`|g'(\lambda)| > 1`, it drives apart two eigenvalues near :math:`\lambda`, and with them the
row norms of the update. Several steps are one map :math:`g_T \circ \dots \circ g_1`, for which the
paper's statements about one step hold too.

Coefficients have the same form and meaning as in :func:`optax_muonplus.polar.newton_schulz`.
Singular values are those that enter the first step. They belong to a matrix of Frobenius norm 1, or
1/1.01 if the table has that safety factor (Polar Express). The paper prints and plots the
coefficients of Polar Express without the safety factor: ``coefficients.polar_express(8)``.

The computations are NumPy in float64.

Source: Zhang et al., Muon+, arXiv:2602.21545, section 2.1 and appendices on the expected variance
shift and on the regions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_muonplus import coefficients
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.theory._crossings import crossings, value_and_slope

Interval = tuple[float, float]


class Regions(NamedTuple):
    """The eigenvalues in two parts. Points where ``|g'|`` is 1 are in neither of them.

    Attributes:
      amplification: open intervals where ``|g'| > 1``, in order.
      reduction: open intervals where ``|g'| < 1``, in order.
    """

    amplification: tuple[Interval, ...]
    reduction: tuple[Interval, ...]


def phi(x: ArrayLike, ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 1) -> np.ndarray:
    r"""What the steps do to a singular value.

    .. math::
      \varphi(x) = c_0 x + c_1 x^3 + c_2 x^5 + \dots, \qquad
      \Phi = \varphi_T \circ \dots \circ \varphi_1

    Args:
      x: singular values, of any shape.
      ns_coeffs: a table's name, one row, or several rows.
      ns_steps: number of steps T; the first T rows of the table are used. The paper's lemma has 1.

    Returns:
      A float64 array of ``x``'s shape.

    Raises:
      ValueError: for an unknown name, too few rows, or ``ns_steps < 1``.
    """
    return coefficients.evaluate(static_rows(ns_coeffs, ns_steps), np.asarray(x, np.float64))


def g(lam: ArrayLike, ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 1) -> np.ndarray:
    r"""What the steps do to an eigenvalue of :math:`X X^\top`, the square of a singular value.

    .. math::
      g(\lambda) = \varphi(\sqrt\lambda)^2 = \lambda (c_0 + c_1 \lambda + c_2 \lambda^2 + \dots)^2,
      \qquad G = g_T \circ \dots \circ g_1

    Args:
      lam: eigenvalues, of any shape.
      ns_coeffs: as in :func:`phi`.
      ns_steps: as in :func:`phi`.

    Returns:
      A float64 array of ``lam``'s shape.

    Raises:
      ValueError: as for :func:`phi`.

    Source: arXiv:2602.21545, Lemma 1.
    """
    return value_and_slope(static_rows(ns_coeffs, ns_steps), np.asarray(lam, np.float64))[0]


def g_prime(
    lam: ArrayLike, ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 1
) -> np.ndarray:
    r"""The derivative of :func:`g` with respect to :math:`\lambda`, by the chain rule.

    .. math::
      g'(\lambda) = P(\lambda) \bigl(P(\lambda) + 2 \lambda P'(\lambda)\bigr), \quad
      P(\lambda) = c_0 + c_1 \lambda + c_2 \lambda^2 + \dots, \qquad
      G'(\lambda) = \prod_t g_t'(\lambda_{t-1})

    Args:
      lam: eigenvalues, of any shape.
      ns_coeffs: as in :func:`phi`.
      ns_steps: as in :func:`phi`.

    Returns:
      A float64 array of ``lam``'s shape.

    Raises:
      ValueError: as for :func:`phi`.

    Source: arXiv:2602.21545, section 2.1.
    """
    return value_and_slope(static_rows(ns_coeffs, ns_steps), np.asarray(lam, np.float64))[1]


def step_regions(
    ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 5, *, upper: float = 1.0
) -> tuple[Regions, ...]:
    """The regions of each single step, for the eigenvalues that enter that step.

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps.
      upper: end of the interval ``[0, upper]`` that is divided. Eigenvalues start in [0, 1], but a
        step may return larger ones: up to 1.45 with the coefficients of Jordan.

    Returns:
      One :class:`Regions` for each step. End points are computed as in :func:`composed_regions`.

    Raises:
      ValueError: as for :func:`phi`; and for an ``upper`` that is not positive and finite, or so
        large that a step diverges.

    Source: arXiv:2602.21545, figures in the appendix on amplification regions.
    """
    return tuple(_regions((row,), upper) for row in static_rows(ns_coeffs, ns_steps))


def composed_regions(
    ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 5, *, upper: float = 1.0
) -> Regions:
    """The regions of all steps together, for the eigenvalues that enter the first step.

    End points are the roots of ``G' = 1`` and ``G' = -1``. All of them are found, without expanding
    G. Each is as accurate as the chain rule in float64: to a relative 1e-12 for the tables in
    ``coefficients.TABLES``.

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps.
      upper: end of the interval ``[0, upper]`` that is divided.

    Returns:
      The :class:`Regions` of the composition.

    Raises:
      ValueError: as for :func:`step_regions`.

    Source: arXiv:2602.21545, section 2.1, applied to the composition of the steps.
    """
    return _regions(static_rows(ns_coeffs, ns_steps), upper)


def corollary_delta(ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 1) -> float:
    r"""The largest :math:`\delta \le 1` of Corollary 1.

    The expected variance shift is positive whenever all eigenvalues are in :math:`[0, \delta]` and
    not all equal. This holds if :math:`|g'| > 1` on :math:`[0, \delta)`, because the lemma's
    :math:`\xi_{ij}` lie in that interval. It fails for any larger :math:`\delta`: two eigenvalues
    just beyond this one are a counterexample.

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps. The corollary has 1, and holds for a composition of steps too.

    Returns:
      :math:`\delta`, a bound of the eigenvalues (squared singular values).

    Raises:
      ValueError: as for :func:`phi`, and unless :math:`\varphi'(0) > 1`.

    Source: arXiv:2602.21545, Corollary 1.
    """
    rows = static_rows(ns_coeffs, ns_steps)
    slope = float(np.prod([row[0] for row in rows]))
    if not slope > 1:
        raise ValueError(
            f"Corollary 1 is for coefficients with phi'(0) > 1; those of {ns_coeffs!r} give"
            f" {slope:g} after {len(rows)} steps, which drives the smallest singular values no"
            " further apart. Pass coefficients whose first numbers have a product above 1."
        )
    return _regions(rows, 1.0).amplification[0][1]


def static_rows(
    ns_coeffs: CoefficientsLike, ns_steps: int | jax.Array
) -> tuple[coefficients.Row, ...]:
    """The coefficients of each step; a traced number of steps raises ValueError."""
    resolved = coefficients.resolve(ns_coeffs, ns_steps)
    if resolved.restarts is None:
        raise ValueError(
            f"ns_steps={ns_steps} is traced, but this is computed in NumPy. Pass a Python int."
        )
    return resolved.rows


def _regions(rows: Sequence[coefficients.Row], upper: float) -> Regions:
    """The regions of the composition of ``rows`` on ``[0, upper]``."""
    if not 0 < upper < np.inf:
        raise ValueError(f"upper must be positive and finite, got {upper}. Eigenvalues end at 1.")
    edges = np.unique(np.concatenate([[0.0], crossings(rows, upper), [upper]]))
    low, high = edges[:-1], edges[1:]
    sides = np.sign(np.abs(value_and_slope(rows, low + (high - low) / 2)[1]) - 1)
    # Where |g'| only touches 1, the intervals on both sides of that point are joined.
    kept = np.concatenate([[True], sides[1:] != sides[:-1]])
    starts, sides = low[kept].tolist(), sides[kept]
    spans = list(zip(starts, [*starts[1:], float(upper)], strict=True))
    amplified, reduced = (
        tuple(span for span, side in zip(spans, sides, strict=True) if side == wanted)
        for wanted in (1, -1)
    )
    return Regions(amplified, reduced)
