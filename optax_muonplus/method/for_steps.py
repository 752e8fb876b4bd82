"""Finds the coefficients of a run of Newton-Schulz: rows of a table, or the caller's own."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import numpy as np

from .arguments import did_you_mean, known_count
from .restarts import Restarts
from .tables import TABLES, Row, Table

# Coefficients are given as a table's name, one row, or several rows.
CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]


# Each step is written out in the program; the paper and its rivals use 4 to 10.
MAX_STEPS = 100
_USER = "user"  # the source of rows that are passed


class Coefficients(NamedTuple):
    """The coefficients that one run of Newton-Schulz uses.

    Attributes:
      rows: exactly ``steps`` rows; or the whole table if ``steps`` is a traced array, and then the
        last row is used for every further step.
      steps: number of steps, a Python int or a traced integer array.
      safety_factor: as in :class:`Table`.
      restarts: steps, counted from 0, at which the Gram iteration computes its Gram matrix again,
        for each precision of products; None if they are not listed, as for rows of your own, and
        if ``steps`` is traced.
      needs_float32: as in :class:`Table`.
    """

    rows: tuple[Row, ...]
    steps: int | jax.Array
    safety_factor: float
    restarts: Restarts | None
    needs_float32: bool

    @property
    def is_traced(self) -> bool:
        """Whether the number of steps is known only when the program runs."""
        return isinstance(self.steps, jax.core.Tracer)


def for_steps(
    ns_coeffs: CoefficientsLike = "jordan", ns_steps: int | jax.Array = 5
) -> Coefficients:
    """Returns the coefficients that ``ns_steps`` steps use: the first rows of a table.

    Args:
      ns_coeffs: a name in :data:`TABLES`, of which the first ``ns_steps`` rows are used; one row of
        at least two numbers, used at every step; or a sequence of ``ns_steps`` rows.
      ns_steps: number of steps, from 1 to 100. A traced integer is accepted for tables whose last
        row may be repeated. (``optax.inject_hyperparams`` traces every number that is not among its
        ``static_args``.)

    Returns:
      The :class:`Coefficients` of the run.

    Raises:
      ValueError: for an unknown name, malformed rows, ``ns_steps`` out of range, more rows of your
        own than steps, or fewer rows than steps where the last row may not be repeated.
    """
    table = _table(ns_coeffs)
    steps = known_count("ns_steps", ns_steps, MAX_STEPS)
    if steps is None:
        if not table.repeats_last:
            raise ValueError(
                f"ns_steps is a traced array, but ns_coeffs={ns_coeffs!r} has a fixed number of"
                f" rows ({len(table.rows)}). Pass ns_steps as a Python int; under"
                " optax.inject_hyperparams add static_args=('ns_steps',)."
            )
        return Coefficients(table.rows, ns_steps, table.safety_factor, None, table.needs_float32)
    if steps > len(table.rows) and not table.repeats_last:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} has {len(table.rows)} rows, too few for ns_steps={steps}, and"
            " repeating its last row would not converge. Pass"
            f" ns_steps={len(table.rows)} or fewer, more rows, or a table that extends:"
            f" {', '.join(name for name, t in TABLES.items() if t.repeats_last)}."
        )
    if table.source == _USER and len(table.rows) > steps:
        raise ValueError(
            f"ns_coeffs has {len(table.rows)} rows, of which ns_steps={steps} would leave out the"
            f" last {len(table.rows) - steps}, which bring singular values to 1. Pass"
            f" ns_steps={len(table.rows)}, or {steps} rows, as polar_express({steps}) of"
            " omp.coefficients makes them."
        )
    missing = max(0, steps - len(table.rows))
    rows = (table.rows + table.rows[-1:] * missing)[:steps]
    restarts = table.restarts[steps - 1] if steps <= len(table.restarts) else None
    return Coefficients(rows, steps, table.safety_factor, restarts, table.needs_float32)


def _of_adamw(rows: np.ndarray) -> str:
    """Returns a sentence for one number, which may stand where AdamW has its first decay."""
    if rows.ndim:
        return ""
    return (
        " If it is b1 of optax.adamw, whose second argument that is: b1 and b2 are"
        " adam_b1=0.9, adam_b2=0.95 here, by name, and the momentum of matrices is beta."
    )


def _table(ns_coeffs: CoefficientsLike) -> Table:
    """Returns the table of that name, or one that is made of the caller's rows."""
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in TABLES:
            raise ValueError(
                f"Unknown ns_coeffs {ns_coeffs!r}. Known names: {', '.join(TABLES)}; or pass rows"
                f" of numbers.{did_you_mean(ns_coeffs, TABLES)}"
            )
        return TABLES[ns_coeffs]
    if isinstance(ns_coeffs, jax.core.Tracer):
        raise ValueError(
            "ns_coeffs is a traced array, but coefficients are static numbers here. Pass a name or"
            " a tuple of Python numbers; under optax.inject_hyperparams a tuple is left alone."
        )
    try:
        rows = np.asarray(ns_coeffs, dtype=np.float64)
    except (TypeError, ValueError):  # words, or rows of several lengths
        rows = np.empty(0)
    if rows.ndim not in (1, 2) or rows.shape[-1] < 2 or rows.shape[0] < 1:
        raise ValueError(
            "ns_coeffs must be one row (c_0, c_1, ...) of at least two numbers, or a sequence of"
            f" such rows of one length; got {ns_coeffs!r}.{_of_adamw(rows)}"
        )
    if not np.all(np.isfinite(rows)):
        raise ValueError(f"ns_coeffs must be finite, got {ns_coeffs!r}.")
    as_rows = tuple(tuple(row) for row in np.atleast_2d(rows).tolist())
    # A single row is used at every step, as in Optax.
    return Table(as_rows, rows.ndim == 1, 1.0, _USER)
