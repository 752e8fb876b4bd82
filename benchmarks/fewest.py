"""Which polynomials bring singular values together in the fewest operations, by count.

`python -m benchmarks.fewest`, `--help` for more. Nothing is run.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from benchmarks import columns
from optax_muonplus import coefficients, polar
from optax_muonplus.method import CoefficientsLike, Row

# Tables by name; "degree 3" and "degree 5" are made for the band by `coefficients.relaxed`, and
# have no Gram form.
CANDIDATES = ("jordan", "you", "dion", "polar_express", "cubic", "degree 3", "degree 5")


class Products(NamedTuple):
    """Where and in which dtype products are made, which decides whether there is a Gram form."""

    name: str
    platform: Literal["cpu", "gpu"]
    dtype: str | None


PRODUCTS = (
    Products("float32", "cpu", None),
    Products("TF32", "gpu", None),
    Products("float16", "gpu", "float16"),
    Products("bfloat16", "gpu", "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What the steps are to reach, and for which matrices they are counted."""

    lower: float = 7e-3
    """Share of the norm from which on singular values are to end in one band."""
    ratio: float = 1.3 / 0.7
    """Of the largest value of that band to its smallest."""
    gain: float = 3.0
    """How many times as large singular values are after preconditioning="aol" as after the
    Frobenius norm; on Gaussian matrices it is about 6 at a side of 1,024."""
    shapes: tuple[tuple[int, int], ...] = ((2048, 2048), (2048, 5461))
    """(out, in) of the matrices."""


def main(config: Config) -> None:
    """Prints operations as shares of those of five plain Jordan steps."""
    if not 0 < config.lower <= config.gain * config.lower <= 1:
        raise SystemExit("--lower and --gain times --lower must lie between 0 and 1.")
    rows = list(candidates(config))
    shown = [columns.word(key, key) for key in ("polynomials", "norm")]
    shown += [columns.number("steps", "steps", 0), columns.number("reach", "reach", 4)]
    for shape, products in itertools.product(config.shapes, PRODUCTS):
        head = f"{shape[0]} x {shape[1]}, {products.name}"
        shares = [share(row["given"], row["steps"], shape, products) for row in rows]
        for row, one in zip(rows, shares, strict=True):
            alike = [x for r, x in zip(rows, shares, strict=True) if r["norm"] == row["norm"]]
            row[head] = f"**{one:.2f}**" if one == min(alike) else f"{one:.2f}"
        shown.append(columns.word(head, head))
    print(columns.table(rows, shown, left=2))


def candidates(config: Config) -> Iterator[dict[str, Any]]:
    """Lists the fewest steps of each kind that reach the lower end."""
    for norm, lower in (("frobenius", config.lower), ("aol", config.gain * config.lower)):
        for name in CANDIDATES:
            for steps in range(1, 9):
                if name in coefficients.TABLES and steps > len(polynomials(name)):
                    break
                given = made(name, steps, lower)
                chosen = coefficients.for_steps(given, steps)
                found = reach(chosen.rows, config.ratio) * chosen.safety_factor
                if found <= lower * (1 + 1e-3):
                    row = {"polynomials": name, "norm": norm, "steps": steps, "reach": found}
                    yield row | {"given": given}
                    break


def polynomials(name: str) -> Sequence[Row]:
    """Returns the rows of a table, as many as may be used."""
    table = coefficients.TABLES[name]
    return table.rows * 8 if table.repeats_last else table.rows


def made(name: str, steps: int, lower: float) -> CoefficientsLike:
    """Returns the table's name, or rows made for the band."""
    degree = name.removeprefix("degree ")
    return coefficients.relaxed(steps, int(degree), lower) if degree != name else name


def reach(rows: Sequence[Row], ratio: float) -> float:
    """Finds from which singular value on all end within ``ratio`` of each other."""
    x = np.geomspace(1, 1e-4, 100_001)
    values = coefficients.evaluate(rows, x)
    ratios = np.maximum.accumulate(values) / np.minimum.accumulate(values)
    beyond = np.flatnonzero((ratios > ratio * (1 + 1e-6)) | (np.minimum.accumulate(values) <= 0))
    return float(x[beyond[0] - 1]) if len(beyond) and beyond[0] else math.inf


def share(given: CoefficientsLike, steps: int, shape: tuple[int, int], products: Products) -> float:
    """Returns the operations of polar="auto" over those of five plain Jordan steps."""
    options = polar.Orthogonalize(given, steps, compute_dtype=products.dtype)
    fast = polar.FastPolar(options, products.platform)
    return fast.flops(shape) / polar.Orthogonalize(polar="newton_schulz").flops(shape)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
