r"""Which singular values a Newton-Schulz step drives apart: the paper's section on amplification.

A step sends a singular value x to :math:`\varphi(x) = c_0 x + c_1 x^3 + c_2 x^5 + \dots` and an
eigenvalue :math:`\lambda = x^2` to :math:`g(\lambda) = \varphi(\sqrt\lambda)^2`. Two eigenvalues
near :math:`\lambda` are driven apart, and the row norms of the update with them, where
:math:`|g'(\lambda)| > 1`. Several steps are one map :math:`g_T \circ \dots \circ g_1`, and all that
the paper says of one holds for it.

Coefficients are given as to :func:`optax_muonplus.polar.newton_schulz` and used as it uses them.
Singular values are those that enter the first step, after the normalization: for a Frobenius norm
of 1, or 1/1.01 where the table has a safety factor (Polar Express). The paper prints and plots the rows
of Polar Express without their safety factor: those are ``coefficients.polar_express(8)``.

NumPy in float64.

Source: Zhang et al., Muon+, arXiv:2602.21545, section 2.1 and appendices on the expected variance
shift and on the regions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_muonplus import coefficients
from optax_muonplus.theory._crossings import crossings, value_and_slope

Interval = tuple[float, float]


class Regions(NamedTuple):
    """A partition of the eigenvalues; points where ``|g'|`` is 1 are in neither part.

    Attributes:
      amplification: open intervals where ``|g'| > 1``, in order.
      reduction: open intervals where ``|g'| < 1``, in order.
    """

    amplification: tuple[Interval, ...]
    reduction: tuple[Interval, ...]


def phi(x: Any, ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 1) -> Any:
    r"""What the steps do to a singular value.

    .. math::
      \varphi(x) = c_0 x + c_1 x^3 + c_2 x^5 + \dots, \qquad
      \Phi = \varphi_T \circ \dots \circ \varphi_1

    Args:
      x: numbers, of any shape.
      ns_coeffs: a table's name, one row, or several rows.
      ns_steps: number of steps T; the first T rows of the table are used. 1 is the paper's lemma.

    Returns:
      A float64 array of ``x``'s shape.

    Raises:
      ValueError: for an unknown name, too few rows, or ``ns_steps < 1``.
    """
    return coefficients.evaluate(static_rows(ns_coeffs, ns_steps), np.asarray(x, np.float64))


def g(lam: Any, ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 1) -> Any:
    r"""What the steps do to an eigenvalue of :math:`X X^\top`, a squared singular value.

    .. math::
      g(\lambda) = \varphi(\sqrt\lambda)^2 = \lambda (c_0 + c_1 \lambda + c_2 \lambda^2 + \dots)^2,
      \qquad G = g_T \circ \dots \circ g_1

    Args:
      lam: numbers, of any shape.
      ns_coeffs: as in :func:`phi`, like the last.
      ns_steps: see above.

    Returns:
      A float64 array of ``lam``'s shape.

    Source: arXiv:2602.21545, Lemma 1.
    """
    return value_and_slope(static_rows(ns_coeffs, ns_steps), np.asarray(lam, np.float64))[0]


def g_prime(lam: Any, ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 1) -> Any:
    r"""The derivative of :func:`g` in :math:`\lambda`, by the chain rule.

    .. math::
      g'(\lambda) = P(\lambda) \bigl(P(\lambda) + 2 \lambda P'(\lambda)\bigr), \quad
      P(\lambda) = c_0 + c_1 \lambda + c_2 \lambda^2 + \dots, \qquad
      G'(\lambda) = \prod_t g_t'(\lambda_{t-1})

    Args:
      lam: as in :func:`g`, like the others.
      ns_coeffs: see above.
      ns_steps: see above.

    Returns:
      A float64 array of ``lam``'s shape.
    """
    return value_and_slope(static_rows(ns_coeffs, ns_steps), np.asarray(lam, np.float64))[1]


def step_regions(
    ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 5, *, upper: float = 1.0
) -> tuple[Regions, ...]:
    """The regions of each step by itself, for the eigenvalues that enter that step.

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps; one result for each.
      upper: end of the interval that is divided. Eigenvalues start in [0, 1], but tables that
        overshoot hand larger ones to later steps: up to 1.45 those of Jordan.

    Returns:
      One :class:`Regions` for each step, with end points as in :func:`composed_regions`.

    Raises:
      ValueError: as :func:`phi`; for an ``upper`` that is not positive and finite, or so large that
        a step diverges.

    Source: arXiv:2602.21545, appendix with the regions, whose figures show them.
    """
    return tuple(_regions((row,), upper) for row in static_rows(ns_coeffs, ns_steps))


def composed_regions(
    ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 5, *, upper: float = 1.0
) -> Regions:
    """The regions of all steps together, for the eigenvalues that enter the first.

    End points are roots of ``G' = 1`` and ``G' = -1``, found without expanding G: all of them, and
    each to the last digits that the chain rule has in float64 (within 1e-12 of itself for the
    tables in ``coefficients.TABLES``).

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps.
      upper: end of the interval that is divided.

    Raises:
      ValueError: as :func:`step_regions`.
    """
    return _regions(static_rows(ns_coeffs, ns_steps), upper)


def corollary_delta(ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 1) -> float:
    r"""The largest :math:`\delta \le 1` of Corollary 1.

    Whenever all eigenvalues are in :math:`[0, \delta]` and not all equal, the expected variance
    shift is positive. That is so while :math:`|g'| > 1` on :math:`[0, \delta)`, since the lemma's
    :math:`\xi_{ij}` lie inside; and for no larger :math:`\delta`, as two eigenvalues just beyond it
    show.

    Args:
      ns_coeffs: as in :func:`phi`.
      ns_steps: number of steps; the corollary is about 1 and holds for their composition too.

    Raises:
      ValueError: as :func:`phi`, and unless :math:`\varphi'(0) > 1`.

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


def static_rows(ns_coeffs: str | Sequence[Any], ns_steps: Any) -> tuple[coefficients.Row, ...]:
    """The rows of ``ns_steps`` steps, a Python int."""
    resolved = coefficients.resolve(ns_coeffs, ns_steps)
    if resolved.restarts is None:
        raise ValueError(
            f"ns_steps={ns_steps} is traced, but this is computed in NumPy. Pass a Python int."
        )
    return resolved.rows


def _regions(rows: Sequence[coefficients.Row], upper: float) -> Regions:
    if not 0 < upper < np.inf:
        raise ValueError(f"upper must be positive and finite, got {upper}. Eigenvalues end at 1.")
    edges = np.unique(np.concatenate([[0.0], crossings(rows, upper), [upper]]))
    low, high = edges[:-1], edges[1:]
    sides = np.sign(np.abs(value_and_slope(rows, low + (high - low) / 2)[1]) - 1)
    # Where |g'| touches 1 and turns back, two neighbours are one interval.
    kept = np.concatenate([[True], sides[1:] != sides[:-1]])
    starts, sides = low[kept].tolist(), sides[kept]
    spans = list(zip(starts, [*starts[1:], float(upper)], strict=True))
    amplified, reduced = (
        tuple(span for span, side in zip(spans, sides, strict=True) if side == wanted)
        for wanted in (1, -1)
    )
    return Regions(amplified, reduced)
