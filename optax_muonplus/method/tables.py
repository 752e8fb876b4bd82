"""The published coefficient tables.

A row ``(c_0, c_1, ..., c_q)`` stands for the polynomial ``p(x) = c_0 x + c_1 x^3 + ... + c_q
x^(2q+1)``. A table has one row for each step.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .restarts import Restarts, by_steps

# The coefficients of one step.
Row = tuple[float, ...]


class Table(NamedTuple):
    """A published list of coefficients.

    Attributes:
      rows: one row for each step, in the order of use.
      repeats_last: whether steps beyond the list repeat its last row. It is True only where the
        composition then converges.
      safety_factor: the input is divided by ``safety_factor * norm`` instead of ``norm``.
      source: where the numbers are from.
      restarts: the restarts of the Gram iteration for one step, for two steps, and so on, which
        were found by simulating the rounding of products. Those for bfloat16 were found by trying:
        with them the result was as near to the float64 polynomial as that of the plain iteration,
        for singular values of five kinds.
      needs_float32: whether the iteration diverges if its products are narrower than float32. It
        does if each polynomial maps to exactly the interval on which the next one was fitted:
        rounding then moves singular values out of that interval.
    """

    rows: tuple[Row, ...]
    repeats_last: bool
    safety_factor: float
    source: str
    restarts: tuple[Restarts, ...] = ()
    needs_float32: bool = False


def scaled(rows: Sequence[Row], factor: float) -> tuple[Row, ...]:
    """Returns the coefficients of ``p(x / factor)``, for each row: ``c_k / factor^(2k+1)``."""
    return tuple(tuple(c / factor ** (2 * k + 1) for k, c in enumerate(row)) for row in rows)


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

# NVIDIA's Emerging-Optimizers and its ports round `relaxed(5)` to these numbers.
_CUBIC = (
    (3.3656576, -3.3420992),
    (2.5744352, -1.4957376),
    (2.5368962, -1.4312570),
    (2.4418906, -1.2764040),
    (2.2230472, -0.9630650),
    # The published list ends above, where values lie in [0.774, 1.3]. The following rows are
    # `minimax` of what is left, and converge to 1.
    (1.5014025502718646, -0.4555803201480042),
    (1.502109400627588, -0.5003013083729487),
    (1.5000028613157368, -0.5000004087593262),
    (1.5, -0.5),
)


TABLES: dict[str, Table] = {
    "jordan": Table(
        _JORDAN,
        True,
        1.0,
        "Jordan et al., Muon, https://kellerjordan.github.io/posts/muon/ (2024)",
        restarts=by_steps(
            float32=(*[()] * 5, (3,), (4,), (4,)),
            bfloat16_x3=(*[()] * 4, (3,), (3,), (4,), (4,)),
            float16=(*[()] * 3, (2,), (2,), (2, 4), (2, 4), (2, 4, 6)),
            bfloat16={5: (1, 3), 6: (1, 2, 4)},
        ),
    ),
    "you": Table(
        _YOU,
        False,
        1.0,
        "Jiacheng You, in arXiv:2602.21545, appendix; first rows used",
        restarts=by_steps(
            float32=[()] * 6,
            bfloat16_x3=(*[()] * 4, (2,), (2,)),
            float16=(*[()] * 3, (2,), (2,), (2,)),
            bfloat16={5: (1, 3)},
        ),
    ),
    "dion": Table(
        _DION,
        False,
        1.0,
        "Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534; optax preset 'dion'",
        restarts=by_steps(
            float32=[()] * 5,
            bfloat16_x3=[()] * 5,
            float16=(*[()] * 3, (2,), (2,)),
            bfloat16={5: (1, 2, 4)},
        ),
    ),
    "polar_express": Table(
        (*scaled(_POLAR_EXPRESS[:-1], 1.01), _POLAR_EXPRESS[-1]),
        True,
        1.01,
        "Amsel et al., The Polar Express, arXiv:2505.16932, appendix A",
        restarts=by_steps(
            float32=(*[()] * 6, (2,), (2,)),
            bfloat16_x3=(*[()] * 3, *[(2,)] * 5),
            float16=((), (), (1,), (2,), (1, 2), (1, 3), (1, 3), (1, 3)),
        ),
    ),
    "turbo": Table(
        _DION[-4:],
        False,
        1.0,
        "Boissin et al., Turbo-Muon, arXiv:2512.04632: 4 steps, meant for preconditioning='aol'",
        restarts=by_steps(
            float32=[()] * 4,
            bfloat16_x3=[()] * 4,
            float16=(*[()] * 3, (2,)),
            bfloat16={4: (2, 3)},
        ),
    ),
    "cans": Table(
        _CANS,
        True,
        1.0,
        "Grishina et al., arXiv:2506.10935, as NVIDIA Emerging-Optimizers rounds them",
        restarts=by_steps(
            float32=(*[()] * 5, (1,), (1,), (2,)),
            bfloat16_x3=(*[()] * 3, (1,), (1,), (1,), (2,), (1, 2)),
            float16=[tuple(range(1, steps)) for steps in range(1, 9)],
        ),
        needs_float32=True,
    ),
    # The first polynomial maps 1 to 0.024, and values slightly above 1 to negative numbers. The
    # safety factor keeps matrices of one singular value away from there: bfloat16 would turn
    # their sign.
    "cubic": Table(
        _CUBIC,
        True,
        1.01,
        "Huang, How Much Orthogonalization Does Muon Need?, arXiv:2606.00371: 5 steps",
        restarts=by_steps(
            float32=[()] * 8,
            bfloat16_x3=[()] * 8,
            float16=(*[()] * 4, (1,), (1,), (2,), (2,)),
            bfloat16={4: (2, 3), 5: (2, 3), 6: (2, 3, 5), 7: (2, 3, 5), 8: (2, 3, 5)},
        ),
    ),
}
# optax.contrib.muon calls the same row "standard".
TABLES["standard"] = TABLES["jordan"]
