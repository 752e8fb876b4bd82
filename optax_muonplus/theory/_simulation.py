"""The expected variance shift of Lemma 1 by simulation, over random matrices.

Source: Zhang et al., Muon+, arXiv:2602.21545, Lemma 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_muonplus.coefficients._minimax import Row
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.theory._amplification import static_rows
from optax_muonplus.theory._variance_shift import as_integer, spectrum

# Elements that a simulation holds at once: 32 MiB.
_MAX_ELEMENTS = 2**22


class Estimate(NamedTuple):
    """A mean over random samples.

    Attributes:
      mean: the mean.
      standard_error: the standard deviation of the mean.
    """

    mean: float
    standard_error: float


def simulate_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
    samples: int = 1000,
    seed: int | np.random.Generator = 0,
) -> Estimate:
    r"""The shift of :func:`expected_variance_shift`, averaged over random matrices.

    .. math::
      \mathrm{Var}(s(Q)) - \mathrm{Var}(s(M)), \qquad M = U \Sigma, \quad Q = U \varphi(\Sigma)

    Each sample draws a Haar-distributed U, makes M, applies the Newton-Schulz products to it and
    takes the variances of squared row norms. The factor :math:`V^\top` is left out, because row
    norms do not depend on it.

    Args:
      singular_values: as in :func:`expected_variance_shift`, but one spectrum ``(r,)``.
      ns_coeffs: as in :func:`expected_variance_shift`.
      ns_steps: as in :func:`expected_variance_shift`.
      size: as in :func:`expected_variance_shift`.
      samples: number of random matrices, at least 2.
      seed: seed, or a NumPy generator.

    Returns:
      Mean and standard error.

    Raises:
      ValueError: as for :func:`expected_variance_shift`; and for a batch of spectra, or ``samples <
        2``.

    Source: arXiv:2602.21545, Lemma 1.
    """
    lam, n = spectrum(singular_values, size)
    if lam.ndim != 1:
        raise ValueError(
            f"A simulation takes one spectrum (r,), got shape {lam.shape}: call it for each."
        )
    if as_integer("samples", samples) < 2:
        raise ValueError(f"samples must be at least 2, to have a standard error; got {samples}.")
    rows = static_rows(ns_coeffs, ns_steps)
    rng = np.random.default_rng(seed)
    batch = max(1, _MAX_ELEMENTS // (n * lam.size))
    counts = [min(batch, samples - start) for start in range(0, samples, batch)]
    shifts = np.concatenate([_shifts(rng, count, n, np.sqrt(lam), rows) for count in counts])
    return Estimate(float(shifts.mean()), float(shifts.std(ddof=1) / np.sqrt(samples)))


def _shifts(
    rng: np.random.Generator, count: int, n: int, sigma: np.ndarray, rows: Sequence[Row]
) -> np.ndarray:
    """``Var(s(Q)) - Var(s(M))`` of ``count`` random matrices."""
    # U is Haar-distributed but for the signs of its columns, which LAPACK chooses. Signs do not
    # change norms.
    u, _ = np.linalg.qr(rng.standard_normal((count, n, sigma.size)))
    m = u * sigma
    q = m
    for row in rows:
        gram = np.swapaxes(q, -1, -2) @ q
        power, image = q, row[0] * q
        for c in row[1:]:
            power = power @ gram
            image = image + c * power
        q = image
    return np.var(np.sum(q * q, -1), axis=-1) - np.var(np.sum(m * m, -1), axis=-1)
