"""The published coefficient tables, and which of their rows a run of some steps uses.

A row ``(c_0, c_1, ..., c_q)`` stands for the polynomial ``p(x) = c_0 x + c_1 x^3 + ... + c_q
x^(2q+1)``. A table has one row for each step.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import numpy as np

from optax_muonplus.coefficients._minimax import Row, scaled
from optax_muonplus.coefficients._restarts import choose_restarts

# A table's name, one row, or several rows.
CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]


class Table(NamedTuple):
    """A published list of coefficients.

    Attributes:
      rows: one row for each step, in the order of use.
      repeats_last: whether steps beyond the list repeat its last row. It is True only where the
        composition then converges.
      safety_factor: the input is divided by ``safety_factor * norm`` instead of ``norm``.
      source: where the numbers are from.
      restarts: the restarts of the Gram iteration for one step, for two steps, and so on. They are
        the results of ``choose_restarts``, which is called for numbers of steps beyond the list.
      needs_float32: whether the iteration diverges if its products are narrower than float32. It
        does if each polynomial maps to exactly the interval on which the next one was fitted:
        rounding then moves singular values out of that interval.
    """

    rows: tuple[Row, ...]
    repeats_last: bool
    safety_factor: float
    source: str
    restarts: tuple[tuple[int, ...], ...] = ()
    needs_float32: bool = False


class Coefficients(NamedTuple):
    """What one run of Newton-Schulz uses.

    Attributes:
      rows: exactly ``steps`` rows; or the whole table if ``steps`` is a traced array, and then the
        last row is used for every further step.
      steps: number of steps, a Python int or a traced integer array.
      safety_factor: as in :class:`Table`.
      restarts: steps, counted from 0, at which the Gram iteration computes its Gram matrix again;
        None if ``steps`` is traced.
      needs_float32: as in :class:`Table`.
    """

    rows: tuple[Row, ...]
    steps: int | jax.Array
    safety_factor: float
    restarts: tuple[int, ...] | None
    needs_float32: bool


_JORDAN = ((3.4445, -4.7750, 2.0315),)

# Six rows, in units of 1/1024, from the appendix on amplification regions of the Muon+ paper
# (arXiv:2602.21545). The last row brings singular values close to 1; five steps do not reach it.
_YOU = tuple(
    (a / 1024, b / 1024, c / 1024)
    for a, b, c in (
        (3955, -8306, 5008),
        (3735, -6681, 3463),
        (3799, -6499, 3211),
        (4019, -6385, 2906),
        (2677, -3029, 1162),
        (2172, -1833, 682),
    )
)

_DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# The result of `polar_express(8)`, without the safety factor: its lower bound is 1e-3, its cushion
# 0.02407327424182761.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
    # The published list ends above, with a row that would converge to 1.028 if it were repeated.
    # The following rows continue its recursion, `polar_express(8, cushion=0)`, and converge to 1.
    (1.8887161973518263, -1.265157225338596, 0.37651892555748845),
    (1.8750008858394267, -1.250000984251773, 0.3750000984126771),
    (1.875, -1.25, 0.375),
)

_NO_RESTARTS: tuple[int, ...] = ()

TABLES: dict[str, Table] = {
    "jordan": Table(
        _JORDAN,
        True,
        1.0,
        "Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/ (2024)",
        restarts=(*[_NO_RESTARTS] * 5, (3,), (4,), (4,)),
    ),
    "you": Table(
        _YOU,
        False,
        1.0,
        "Jiacheng You, in arXiv:2602.21545, appendix; first rows used",
        restarts=(_NO_RESTARTS,) * 6,
    ),
    "dion": Table(
        _DION,
        False,
        1.0,
        "Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534; optax preset 'dion'",
        restarts=(_NO_RESTARTS,) * 5,
    ),
    "polar_express": Table(
        (*scaled(_POLAR_EXPRESS[:-1], 1.01), _POLAR_EXPRESS[-1]),
        True,
        1.01,
        "Amsel et al., The Polar Express, arXiv:2505.16932, appendix A",
        restarts=(*[_NO_RESTARTS] * 6, (2,), (2,)),
    ),
    "turbo": Table(
        _DION[-4:],
        False,
        1.0,
        "Boissin et al., Turbo-Muon, arXiv:2512.04632: 4 steps, meant for preconditioning='aol'",
        restarts=(_NO_RESTARTS,) * 4,
    ),
    "cans": Table(
        _CANS,
        True,
        1.0,
        "Grishina et al., arXiv:2506.10935, as NVIDIA Emerging-Optimizers rounds them",
        restarts=(*[_NO_RESTARTS] * 5, (1,), (1,), (2,)),
        needs_float32=True,
    ),
}
# optax.contrib.muon calls the same row "standard".
TABLES["standard"] = TABLES["jordan"]


def resolve(ns_coeffs: CoefficientsLike = "jordan", ns_steps: int | jax.Array = 5) -> Coefficients:
    """The coefficients that ``ns_steps`` steps use: the first rows of a table.

    Args:
      ns_coeffs: a name in :data:`TABLES`; one row of at least two numbers, used at every step; or a
        sequence of rows, of which the first ``ns_steps`` are used.
      ns_steps: number of steps, at least 1. A traced integer is accepted for tables whose last row
        may be repeated. (``optax.inject_hyperparams`` traces every number that is not among its
        ``static_args``.)

    Returns:
      The :class:`Coefficients` of the run.

    Raises:
      ValueError: for an unknown name, malformed rows, ``ns_steps < 1``, or fewer rows than steps
        where the last row may not be repeated.
    """
    table = _table(ns_coeffs)
    if isinstance(ns_steps, jax.core.Tracer):
        if not table.repeats_last:
            raise ValueError(
                f"ns_steps is a traced array, but ns_coeffs={ns_coeffs!r} has a fixed number of"
                f" rows ({len(table.rows)}). Pass ns_steps as a Python int; under"
                " optax.inject_hyperparams add static_args=('ns_steps',)."
            )
        return Coefficients(table.rows, ns_steps, table.safety_factor, None, table.needs_float32)
    try:
        steps = operator.index(ns_steps)
    except TypeError:
        steps = 0
    if steps < 1:
        raise ValueError(f"ns_steps must be an integer of at least 1, got {ns_steps!r}.")
    if steps > len(table.rows) and not table.repeats_last:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} has {len(table.rows)} rows, too few for ns_steps={steps}, and"
            " repeating its last row would not converge. Pass"
            f" ns_steps={len(table.rows)} or fewer, more rows, or a table that extends:"
            f" {', '.join(name for name, t in TABLES.items() if t.repeats_last)}."
        )
    missing = max(0, steps - len(table.rows))
    rows = (table.rows + table.rows[-1:] * missing)[:steps]
    listed = steps <= len(table.restarts)
    restarts = table.restarts[steps - 1] if listed else choose_restarts(rows)
    return Coefficients(rows, steps, table.safety_factor, restarts, table.needs_float32)


def _table(ns_coeffs: CoefficientsLike) -> Table:
    """The table of that name, or one that is made of the caller's rows."""
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in TABLES:
            raise ValueError(
                f"Unknown ns_coeffs {ns_coeffs!r}. Known names: {', '.join(TABLES)}; or pass rows"
                " of numbers."
            )
        return TABLES[ns_coeffs]
    if isinstance(ns_coeffs, jax.core.Tracer):
        raise ValueError(
            "ns_coeffs is a traced array, but coefficients are static numbers here. Pass a name or"
            " a tuple of Python numbers; under optax.inject_hyperparams a tuple is left alone."
        )
    rows = np.asarray(ns_coeffs, dtype=np.float64)
    if rows.ndim not in (1, 2) or rows.shape[-1] < 2 or rows.shape[0] < 1:
        raise ValueError(
            "ns_coeffs must be one row (c_0, c_1, ...) of at least two numbers, or a sequence of"
            f" such rows of one length; got shape {rows.shape}."
        )
    if not np.all(np.isfinite(rows)):
        raise ValueError(f"ns_coeffs must be finite, got {ns_coeffs!r}.")
    as_rows = tuple(tuple(row) for row in np.atleast_2d(rows).tolist())
    # A single row is used at every step, as in Optax.
    return Table(as_rows, rows.ndim == 1, 1.0, "user")
