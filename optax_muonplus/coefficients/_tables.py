"""Coefficients of the odd polynomials that Newton-Schulz iterations apply.

A row ``(c_0, c_1, ..., c_q)`` is the polynomial ``p(x) = c_0 x + c_1 x^3 + ... + c_q x^(2q+1)``; a
table is one row for each step. Everything here is plain Python and NumPy: coefficients are static
numbers, never arrays in an optimizer's state.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.core
import numpy as np

from optax_muonplus.coefficients._minimax import Row, scaled
from optax_muonplus.coefficients._restarts import choose_restarts


class Table(NamedTuple):
    """A published list of coefficient rows.

    Attributes:
      rows: one row for each step, in the order of use.
      repeats_last: whether steps beyond the list repeat its last row. True only where the
        composition then converges.
      safety_factor: the pre-normalization divides by ``safety_factor * norm`` instead of ``norm``.
      source: where the numbers are from.
      restarts: for one step, two steps and so on, where the Gram iteration starts anew, as
        ``choose_restarts`` has it. It is asked for numbers of steps that are not listed.
      needs_float32: whether each polynomial ends where the next one's good interval does, so that
        the rounding of narrower products throws singular values out of it, and they diverge.
    """

    rows: tuple[Row, ...]
    repeats_last: bool
    safety_factor: float
    source: str
    restarts: tuple[tuple[int, ...], ...] = ()
    needs_float32: bool = False


class Coefficients(NamedTuple):
    """What one Newton-Schulz run uses: its rows, how many steps of them, safety_factor and restarts.

    Attributes:
      rows: exactly ``steps`` rows, or the whole table if ``steps`` is a traced array (the last row
        then serves every further step).
      steps: number of steps, a Python int or a traced integer array.
      safety_factor: see :class:`Table`.
      restarts: steps at which the Gram iteration starts anew; None if ``steps`` is traced.
      needs_float32: see :class:`Table`.
    """

    rows: tuple[Row, ...]
    steps: Any
    safety_factor: float
    restarts: tuple[int, ...] | None
    needs_float32: bool


_JORDAN = ((3.4445, -4.7750, 2.0315),)

# Six rows in 1024ths; the Muon+ paper (arXiv:2602.21545) lists them in its appendix on
# amplification regions. With five steps the closing contraction, row six, is not reached.
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

# Before the safety factor. Lower bound 1e-3, cushion 0.02407327424182761: `polar_express(8)`.
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
    # The published list ends above, on a row that would settle at 1.028 if it were repeated. These
    # continue the same recursion, `polar_express(8, cushion=0)`, and close at 1.
    (1.8887161973518263, -1.265157225338596, 0.37651892555748845),
    (1.8750008858394267, -1.250000984251773, 0.3750000984126771),
    (1.875, -1.25, 0.375),
)

_NONE: tuple[int, ...] = ()

TABLES: dict[str, Table] = {
    "jordan": Table(
        _JORDAN,
        True,
        1.0,
        "Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/ (2024)",
        restarts=(*[_NONE] * 5, (3,), (4,), (4,)),
    ),
    "you": Table(
        _YOU,
        False,
        1.0,
        "Jiacheng You, in arXiv:2602.21545, appendix; first rows used",
        restarts=(_NONE,) * 6,
    ),
    "dion": Table(
        _DION,
        False,
        1.0,
        "Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534; optax preset 'dion'",
        restarts=(_NONE,) * 5,
    ),
    "polar_express": Table(
        (*scaled(_POLAR_EXPRESS[:-1], 1.01), _POLAR_EXPRESS[-1]),
        True,
        1.01,
        "Amsel et al., The Polar Express, arXiv:2505.16932, appendix A",
        restarts=(*[_NONE] * 6, (2,), (2,)),
    ),
    "turbo": Table(
        _DION[-4:],
        False,
        1.0,
        "Boissin et al., Turbo-Muon, arXiv:2512.04632: 4 steps, meant for preconditioning='aol'",
        restarts=(_NONE,) * 4,
    ),
    "cans": Table(
        _CANS,
        True,
        1.0,
        "Grishina et al., arXiv:2506.10935, as NVIDIA Emerging-Optimizers rounds them",
        restarts=(*[_NONE] * 5, (1,), (1,), (2,)),
        needs_float32=True,
    ),
}
# optax.contrib.muon's name for the same row.
TABLES["standard"] = TABLES["jordan"]


def resolve(ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: Any = 5) -> Coefficients:
    """The rows that ``ns_steps`` steps of a named or user-given table use: its first ones.

    Args:
      ns_coeffs: a name in :data:`TABLES`; one row of at least two numbers, used at every step; or a
        sequence of rows, of which the first ``ns_steps`` are used.
      ns_steps: number of steps, at least 1. A traced integer is accepted where the last row may be
        repeated (``optax.inject_hyperparams`` makes one of every number that it is not told to
        leave alone).

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


def _table(ns_coeffs: str | Sequence[Any]) -> Table:
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
    # A single row is the request to use it at every step, as in optax.
    return Table(as_rows, rows.ndim == 1, 1.0, "user")
