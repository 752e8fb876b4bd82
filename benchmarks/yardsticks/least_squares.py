r"""Least squares whose rows differ in size, the table of arXiv:2609.39114 (its Tables 1 and 7).

Minimizes :math:`f(X) = \|X - C\|_F^2 / 2` from :math:`X = 0`. Row i of C (m, 8) is a random
direction of a length proportional to 1/i, and :math:`\|C\|_F = 1`. A figure is :math:`\log_{10}` of
f at the start over the least f of a run. Rate and momentum are chosen by its mean over other seeds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from benchmarks import columns, records
from benchmarks.yardsticks import intervals, resuming
from examples.trainer.system.errors import UserError
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum

INPUTS = 8  # columns of C
DECADES = (-5, 1)  # range of the rates; the paper's ends at 1, which was the best for some sizes
DECAYS = (0.0, 0.5, 0.9, 0.95)  # the paper's
MATRIX = {"x": omp.MuonDimensionNumbers(reduction_axis=1, output_axis=0)}
PUBLISHED = {
    1000: {"Muon": (5.70, 5.70, 5.70, 5.72, 5.72), "NorMuon": (5.70, 5.46, 5.00, 4.12, 3.15)},
    25: {"Muon": (5.51, 5.57, 5.55, 5.57, 5.57), "NorMuon": (5.51, 4.64, 4.75, 3.63, 3.58)},
}
"""By the number of steps: Table 1 with a constant rate, and Table 7 with a cosine."""
PUBLISHED_SIZES = (8, 32, 128, 512, 2048)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes, the length of a run and the seeds."""

    sizes: tuple[int, ...] = PUBLISHED_SIZES
    """Rows of C."""
    steps: int = 25
    """Steps of a run; published are 25 with a cosine, and 1000 without."""
    cosine: bool = True
    """Whether the rate falls along a cosine; else it is constant."""
    rates_per_decade: int = 2
    """Rates in the grid from 1e-5 to 10, of which the paper has two a decade."""
    polar: Literal["svd", "auto"] = "svd"
    """The exact polar factor, as in the paper, or the library's default iteration."""
    tuning_seeds: int = 3
    """Targets C that choose rate and decay of the momentum."""
    seeds: int = 10
    """Further targets, whose mean is in the table."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def normuon(rate: Any, beta: Any, polar: Any, beta2: float) -> optax.GradientTransformation:
    """NorMuon as in the paper's equation 4.1."""
    link = omp.contrib.NorMuon(
        beta2=beta2,
        shape_scale="none",
        momentum=Momentum(beta, nesterov=False),
        polar_factor=Orthogonalize(polar=polar),
    )
    return omp.contrib.normuon(rate, link, where=omp.Matrices(dimension_numbers=MATRIX))


def muonplus(
    rate: Any, beta: Any, polar: Any, norm: Any, matched: bool = False
) -> optax.GradientTransformation:
    """Muon+ with the paper's momentum and without a factor for the shape."""
    return omp.muonplus(
        rate,
        beta=beta,
        norm=norm,
        match_frobenius=matched,
        shape_scale="none",
        nesterov=False,
        polar=polar,
        muon_weight_dimension_numbers=MATRIX,
    )


METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "Muon": functools.partial(muonplus, norm="none"),
    "NorMuon, beta2 0.99": functools.partial(normuon, beta2=0.99),
    "NorMuon, beta2 0.9": functools.partial(normuon, beta2=0.9),
    "Muon+ row, matched": functools.partial(muonplus, norm="row", matched=True),
    "Muon+ col_row": functools.partial(muonplus, norm="col_row"),
    "Muon+ row_col": functools.partial(muonplus, norm="row_col"),
}
"""From rate, decay of the momentum, and polar factor; rows are the long side here."""


def main(config: Config) -> None:
    """Prints the table and writes all figures as JSON."""
    counts = (*config.sizes, config.steps, config.tuning_seeds, config.rates_per_decade)
    if min(counts) < 1 or config.seeds < 2:
        raise UserError("--seeds begins at 2, and the other numbers at 1.")
    name = f"least-squares-{config.steps}-{config.rates_per_decade}-{config.polar}"
    name += "" if config.cosine else "-constant"
    run = records.describe_run("benchmarks.yardsticks least-squares", config)
    shown = {row["method"]: row["written"] for row in published(config)}
    tasks = [{"method": method} for method in METHODS]
    rows = resuming.measured(
        config.out, name, {**run, "published": shown}, tasks, functools.partial(measure, config)
    )
    print(table([*rows, *published(config)], config))


def measure(config: Config, method: str) -> dict[str, Any]:
    """Makes the row of a method."""
    return {"sizes": {str(size): measure_size(method, size, config) for size in config.sizes}}


def measure_size(method: str, size: int, config: Config) -> dict[str, Any]:
    """Chooses rate and decay with some targets, and finds the reduction of others with them."""
    first, last = DECADES
    grid = np.logspace(first, last, (last - first) * config.rates_per_decade + 1)
    rates, decays = (jnp.asarray(x.ravel()) for x in np.meshgrid(grid, DECAYS))
    seeds = np.arange(config.tuning_seeds + config.seeds)
    targets = jnp.asarray([target(size, seed) for seed in seeds])
    over_seeds = jax.jit(jax.vmap(functools.partial(reduction, method, config), (None, None, 0)))
    tuned = jax.vmap(over_seeds, (0, 0, None))(rates, decays, targets[: config.tuning_seeds])
    best = int(jnp.argmax(jnp.nan_to_num(tuned.mean(1), nan=-math.inf)))
    found = over_seeds(rates[best], decays[best], targets[config.tuning_seeds :])
    at_end = rates[best] in (rates.min(), rates.max())
    return {
        "rate": float(rates[best]),
        "rate_at_end": bool(at_end),
        "beta": float(decays[best]),
        "reductions": [float(x) for x in found],
    }


def target(size: int, seed: int) -> np.ndarray:
    """C (size, 8) in float32: random directions of length 1/i, the whole of norm 1."""
    rows = np.random.default_rng(seed).normal(size=(size, INPUTS))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) * np.arange(1, size + 1)[:, None]
    return (rows / np.linalg.norm(rows)).astype(np.float32)


def reduction(method: str, config: Config, rate: Any, beta: Any, c: jax.Array) -> jax.Array:
    """Orders of magnitude by which one run reduces f."""
    falling = optax.cosine_decay_schedule(1.0, config.steps)
    share = falling if config.cosine else optax.constant_schedule(1.0)
    tx = METHODS[method](lambda step: rate * share(step), beta, config.polar)
    x = jnp.zeros_like(c)

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        x, state = carry
        updates, state = tx.update({"x": x - c}, state, {"x": x})
        x = x + jax.tree.leaves(updates)[0]
        return (x, state), jnp.sum((x - c) ** 2)

    _, squares = jax.lax.scan(step, (x, tx.init({"x": x})), length=config.steps)
    return -jnp.log10(jnp.minimum(jnp.min(squares), 1.0))  # f is 1/2 at the start


def published(config: Config) -> list[dict[str, Any]]:
    """The paper's rows, if it has runs of this kind."""
    if config.cosine != (config.steps == 25):
        return []
    return [
        {
            "method": f"{name}, published",
            "written": {str(m): f"{x:.2f}" for m, x in zip(PUBLISHED_SIZES, values, strict=True)},
        }
        for name, values in PUBLISHED.get(config.steps, {}).items()
    ]


def table(rows: list[dict[str, Any]], config: Config) -> str:
    """A row for each method and a column for each size."""
    sizes = [(f"m = {m}", functools.partial(cell, size=str(m))) for m in config.sizes]
    return columns.table(rows, [columns.word("method", "method"), *sizes])


def cell(row: columns.Row, size: str) -> str:
    """Mean and interval, with a star where the best rate is an end of the grid."""
    if "written" in row:
        return row["written"].get(size, "")
    found = row["sizes"].get(size)
    if found is None:
        return ""
    return intervals.written(found["reductions"], 2) + "*" * found["rate_at_end"]
