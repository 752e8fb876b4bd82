"""The coefficients of Newton-Schulz: published tables, and the rows of one run.

A row ``(c_0, ..., c_q)`` is the polynomial ``c_0 x + c_1 x^3 + ... + c_q x^(2q+1)`` of one step.
"""

import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from .arguments import check_word, known_count

Row = tuple[float, ...]  # the coefficients of one step
CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]  # a name, a row, or rows

DEFAULT_STEPS = 5  # the paper's
MAX_STEPS = 100  # a program unrolls its steps


class Restarts(NamedTuple):
    """Steps, counted from 0, that recompute the Gram matrix, for each dtype of products."""

    float32: tuple[int, ...]
    bfloat16: tuple[int, ...]  # all, unless fewer were measured to be as exact


class Table(NamedTuple):
    """A published list of coefficients, with the restarts of its Gram form.

    The Gram form multiplies polynomials of ``R = X X^H`` and applies their product Q to X at the
    end. Rounding makes the smallest eigenvalues of R slightly negative, and there Q is larger than
    at the square of any singular value. The error grows with the condition number of Q. A *restart*
    applies Q to X and recomputes R; the plain iteration restarts at every step.

    Restarts for float32 come from simulated rounding. For bfloat16 they were measured: for five
    kinds of singular values, results were as close to the float64 polynomial as with the plain
    iteration.
    """

    rows: tuple[Row, ...]  # one for each step
    repeats_last: bool  # whether the iteration converges if the last row is repeated
    safety_factor: float  # multiplies the norm by which the input is divided
    source: str
    float32: Sequence[tuple[int, ...]] = ()  # of one step, of two steps, and so on
    bfloat16: Mapping[int, tuple[int, ...]] = types.MappingProxyType({})  # by number of steps

    def restarts(self, steps: int) -> Restarts | None:
        """Returns the restarts of a run, or None if they are not listed."""
        if steps > len(self.float32):
            return None
        bfloat16 = self.bfloat16.get(steps, tuple(range(1, steps)))
        return Restarts(self.float32[steps - 1], bfloat16)


class Coefficients(NamedTuple):
    """The coefficients of one run of Newton-Schulz, with the safety factor of their table."""

    rows: tuple[Row, ...]  # one for each step; if traced, a whole table, whose last row repeats
    steps: int | jax.Array
    safety_factor: float
    restarts: Restarts | None = None  # of the Gram form, if known


def for_steps(
    ns_coeffs: CoefficientsLike = "jordan", ns_steps: int | jax.Array | None = None
) -> Coefficients:
    """Returns the coefficients of ``ns_steps`` steps: the first rows of a table.

    Args:
      ns_coeffs: a name in :data:`TABLES`; one row of at least two numbers, for every step; or a
        sequence of ``ns_steps`` rows.
      ns_steps: number of steps, from 1 to 100; 5 if None. It may be a traced integer if the last
        row may be repeated. (``optax.inject_hyperparams`` traces numbers outside ``static_args``.)

    Raises:
      ValueError: for an unknown name, malformed rows, ``ns_steps`` out of range, more rows of your
        own than steps, or fewer rows than steps if the last row may not be repeated.
    """
    is_name = isinstance(ns_coeffs, str)
    if is_name:
        check_word("ns_coeffs", ns_coeffs, tuple(TABLES), "; or pass rows")
    table = TABLES[ns_coeffs] if is_name else _table_of_rows(ns_coeffs)
    ns_steps = DEFAULT_STEPS if ns_steps is None else ns_steps
    known, listed = known_count("ns_steps", ns_steps, MAX_STEPS), len(table.rows)
    if known is None and not table.repeats_last:
        raise ValueError(
            f"ns_steps is a traced array, but ns_coeffs={ns_coeffs!r} has a fixed number of rows"
            f" ({listed}). Pass ns_steps as a Python int; under optax.inject_hyperparams add"
            " static_args=('ns_steps',)."
        )
    steps = MAX_STEPS if known is None else known
    if steps > listed and not table.repeats_last:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} has {listed} rows, too few for ns_steps={steps}, and"
            f" repeating its last row would not converge. Pass ns_steps={listed} or fewer, more"
            " rows, or a table whose last row may repeat:"
            f" {', '.join(name for name, t in TABLES.items() if t.repeats_last)}."
        )
    if steps < listed and not is_name:
        raise ValueError(
            f"ns_coeffs has {listed} rows, but ns_steps={steps} would leave out the last"
            f" {listed - steps}, which bring singular values to 1. Pass ns_steps={listed}, or"
            f" {steps} rows."
        )
    rows = (table.rows + table.rows[-1:] * (steps - listed))[:steps]
    if not is_name:
        _check_bounds(rows)
    if known is None:
        return Coefficients(table.rows, ns_steps, table.safety_factor)
    return Coefficients(rows, steps, table.safety_factor, table.restarts(steps))


def _table_of_rows(ns_coeffs: Sequence[float] | Sequence[Sequence[float]]) -> Table:
    """Makes a table of the caller's rows. A single row serves every step, as in Optax."""
    try:
        rows = np.asarray(ns_coeffs, dtype=np.float64)
    except (TypeError, ValueError):  # words, rows of different lengths, a tracer
        rows = np.zeros(())
    if rows.ndim not in (1, 2) or rows.shape[-1] < 2 or rows.shape[0] < 1:
        raise ValueError(
            "ns_coeffs must be one row (c_0, c_1, ...) of at least two numbers, or a sequence of"
            f" such rows of one length; got {ns_coeffs!r}."
        )
    return Table(tuple(map(tuple, np.atleast_2d(rows).tolist())), rows.ndim == 1, 1.0, "")


def _check_bounds(rows: Sequence[Row]) -> None:
    """Raises ValueError unless the rows map (0, 1] near 1 and keep the sign of small values."""
    x = np.append(1e-9, np.linspace(1 / 512, 1, 512))
    with np.errstate(all="ignore"):
        for row in rows:
            x = x * np.polyval(row[::-1], x * x)
    if not (x[0] > 0 and x.min() >= -2 and 0.5 <= x.max() <= 2):  # 2 is as far from 1 as 0 is
        raise ValueError(
            f"ns_coeffs must bring singular values in [0, 1] near 1, but {len(rows)} steps bring"
            f" them to [{x.min():.3g}, {x.max():.3g}], the smallest to {x[0]:.3g}."
            f" Pass other rows; the last is {rows[-1]}."
        )


def scale_rows(rows: Sequence[Row], factor: float) -> tuple[Row, ...]:
    """Returns the coefficients of ``p(x / factor)`` for each row: ``c_k / factor^(2k+1)``."""
    return tuple(tuple(c / factor ** (2 * k + 1) for k, c in enumerate(row)) for row in rows)


# From the appendix "amplification regions" of the Muon+ paper, arXiv:2602.21545. Only the sixth row
# brings singular values close to 1.
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

# As printed, without the safety factor. Each row is the odd polynomial closest to 1 on the image of
# [1e-3, 1] under the rows before it, its lower end raised to 0.02407327424182761 of the upper one.
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

# As NVIDIA's Emerging-Optimizers rounds them. Each cubic maps the image of [7e-3, 1] under the
# rows before it to the narrowest interval with the upper end 1.3.
_CUBIC = (
    (3.3656576, -3.3420992),
    (2.5744352, -1.4957376),
    (2.5368962, -1.4312570),
    (2.4418906, -1.2764040),
    (2.2230472, -0.9630650),
    # The published list ends here, with values in [0.774, 1.3]. The following rows are the cubics
    # closest to 1 on what is left, and converge to 1.
    (1.5014025502718646, -0.4555803201480042),
    (1.502109400627588, -0.5003013083729487),
    (1.5000028613157368, -0.5000004087593262),
    (1.5, -0.5),
)

TABLES: dict[str, Table] = {
    "jordan": Table(
        ((3.4445, -4.7750, 2.0315),),
        True,
        1.0,
        "Jordan, kellerjordan.github.io/posts/muon (2024)",
        (*[()] * 5, (3,), (4,), (4,)),
        {5: (1, 3), 6: (1, 2, 4)},
    ),
    "you": Table(
        _YOU,
        False,
        1.0,
        "Jiacheng You, in arXiv:2602.21545, appendix; first rows used",
        [()] * 6,
        {5: (1, 3)},
    ),
    "dion": Table(
        _DION,
        False,
        1.0,
        "Jiacheng You, x.com/YouJiacheng/status/1905861218138804534",
        [()] * 5,
        {5: (1, 2, 4)},
    ),
    "polar_express": Table(
        (*scale_rows(_POLAR_EXPRESS[:-1], 1.01), _POLAR_EXPRESS[-1]),
        True,
        1.01,
        "Amsel et al., arXiv:2505.16932, appendix A",
        (*[()] * 6, (2,), (2,)),
    ),
    # The first row maps 1 to 0.024, and values slightly above 1 to negative ones. The safety factor
    # keeps the singular value of a rank-one matrix below 1, even after rounding to bfloat16.
    "cubic": Table(
        _CUBIC,
        True,
        1.01,
        "Huang, arXiv:2606.00371: 5 steps",
        [()] * 8,
        {4: (2, 3), 5: (2, 3), 6: (2, 3, 5), 7: (2, 3, 5), 8: (2, 3, 5)},
    ),
}
# optax.contrib.muon calls the same row "standard".
TABLES["standard"] = TABLES["jordan"]
