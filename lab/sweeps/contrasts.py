"""Differences between methods, which may be of several sweeps, with intervals by paired seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from scipy import optimize, stats

from examples.trainer.settings.validation import STRICT, from_dict
from examples.trainer.system.errors import UserError
from lab.sweeps import results
from lab.sweeps.results import Sweep, markdown


@dataclass(frozen=True)
class Term:
    """A method at its best rate, times a factor."""

    factor: float
    sweep: str
    method: str


@dataclass(frozen=True)
class Contrast:
    """A sum of terms, whose factors add up to zero, and what was predicted before the runs."""

    __pydantic_config__ = STRICT

    name: str
    terms: tuple[Term, ...]
    refuted_if: str = ""
    fresh: bool = False
    """Whether seeds that chose a rate are left out."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "Contrast":
        """Refuses a sum that is not a difference."""
        if not self.terms or not abs(sum(term.factor for term in self.terms)) < 1e-6:
            raise ValueError(f"{self.name}: give terms whose factors add up to zero")
        return self


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval, and how likely so large a one is by chance."""

    mean: float
    half_width: float
    p: float
    seeds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates the mean of independent values by Student's t; infinite if one is not finite.

    One value, and values that are equal but for rounding, have no spread to test by: p is 1.
    """
    n = len(values)
    if not all(map(math.isfinite, values)):
        return Estimate(math.inf, math.inf, 1.0, n)
    mean = statistics.fmean(values)
    if math.isclose(min(values), max(values), abs_tol=1e-12):
        return Estimate(mean, 0.0 if n > 1 else math.inf, 1.0, n)
    error = statistics.stdev(values) / math.sqrt(n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return Estimate(mean, half, float(2 * stats.t.sf(abs(mean) / error, n - 1)), n)


@dataclass(frozen=True)
class Pooled:
    """A mean over cells whose true differences vary, with the interval of a new cell."""

    mean: float
    half_width: float
    p: float
    tau: float
    """The deviation of the true differences of cells."""
    new_cell: float
    """Half of the 95% interval of the true difference of a cell that is not among them."""


def pooled(means: Sequence[float], errors: Sequence[float]) -> Pooled:
    """Pools differences with their standard errors under random effects.

    Cells are weighted by ``1 / (error^2 + tau^2)``. ``tau`` is that of Paule and Mandel (1982): the
    weighted squares about the mean add up to their degrees of freedom. The interval is that of
    Hartung and Knapp (2001), by Student's t, and the prediction has their variance and tau's.

    Raises:
      UserError: for fewer than three cells.
    """
    y, variances = np.asarray(means), np.square(errors)
    freedom = len(y) - 1
    if freedom < 2:
        raise UserError(f"{len(y)} lines with a spread: a pooled estimate takes three or more")

    def squares(tau2: float) -> float:
        weights = 1 / (variances + tau2)
        return float(np.sum(weights * np.square(y - np.average(y, weights=weights))))

    tau2 = 0.0
    if squares(0.0) > freedom:
        tau2 = optimize.brentq(lambda x: squares(x) - freedom, 0.0, float(np.ptp(y)) ** 2 + 1e-12)
    weights = 1 / (variances + tau2)
    mean = float(np.average(y, weights=weights))
    variance = squares(tau2) / freedom / float(np.sum(weights))
    error, t = math.sqrt(variance), float(stats.t.ppf(0.975, freedom))
    p = float(2 * stats.t.sf(abs(mean) / error, freedom))
    new_cell = float(stats.t.ppf(0.975, freedom - 1)) * math.sqrt(tau2 + variance)
    return Pooled(mean, t * error, p, math.sqrt(tau2), new_cell)


def holm(ps: Sequence[float]) -> list[float]:
    """Corrects p-values for their number (Holm 1979): each is at least the smaller ones."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, ps[i] * (len(ps) - rank)))
        corrected[i] = largest
    return corrected


def values(contrast: Contrast, sweeps: dict[str, Sweep]) -> list[float]:
    """Returns the sum for each seed that all terms were run with."""
    found = [(term.factor, losses(term, sweeps, contrast.fresh)) for term in contrast.terms]
    seeds = sorted(set.intersection(*(set(by_seed) for _, by_seed in found)))
    if not seeds:
        raise UserError("no seed that all terms have")
    return [sum(factor * by_seed[seed] for factor, by_seed in found) for seed in seeds]


def sweeps_of(contrasts: Iterable[Contrast], root: Path) -> dict[str, Sweep]:
    """Reads the sweeps that contrasts name, without those that have no runs."""
    names = {term.sweep for contrast in contrasts for term in contrast.terms}
    return {
        name: results.read(root / name) for name in names if (root / name / "runs.jsonl").is_file()
    }


def measured(contrast: Contrast, root: Path) -> Estimate:
    """Estimates one contrast from the folder of its sweeps."""
    return estimate(values(contrast, sweeps_of([contrast], root)))


def losses(term: Term, sweeps: dict[str, Sweep], fresh: bool) -> dict[int, float]:
    sweep = sweeps.get(term.sweep)
    by_name = {method.name: method for method in sweep.methods()} if sweep else {}
    if sweep is None or term.method not in by_name:
        raise UserError(f"{term.sweep} has no runs of {term.method}")
    method = by_name[term.method]
    return sweep.fresh(method) if fresh else sweep.best(method)


def table(contrasts: Iterable[Contrast], root: Path) -> str:
    """Writes a line for each contrast; Holm's correction is over those with a spread."""
    contrasts = list(contrasts)
    sweeps = sweeps_of(contrasts, root)
    rows, tested = [], []
    for contrast in contrasts:
        try:
            e = estimate(values(contrast, sweeps))
        except UserError as error:
            rows.append([contrast.name, str(error), "", "", "", contrast.refuted_if])
            continue
        # Pages have three digits: of fewer than five the last would be rounded twice.
        mean = f"{e.mean:+.5f} ± {e.half_width:.5f}" if math.isfinite(e.mean) else "diverged"
        rows.append([contrast.name, mean, "", "", str(e.seeds), contrast.refuted_if])
        if 0 < e.half_width < math.inf:
            tested.append((rows[-1], e.p))
    for (row, p), corrected in zip(tested, holm([p for _, p in tested]), strict=True):
        row[2:4] = f"{p:.2g}", f"{corrected:.2g}"
    head = ["difference of losses", "mean, 95%", "p", "p (Holm)", "seeds", "refuted if"]
    return markdown(head, rows)


def pooled_line(contrasts: Iterable[Contrast], root: Path) -> str:
    """Writes the mean over contrasts, each of which is of another cell with seeds of its own."""
    found = [measured(contrast, root) for contrast in contrasts]
    errors = [e.half_width / float(stats.t.ppf(0.975, e.seeds - 1)) for e in found]
    pool = pooled([e.mean for e in found], errors)
    seeds, below = sum(e.seeds for e in found), sum(e.mean < 0 for e in found)
    return (
        f"pooled over {len(found)} lines, {seeds} seeds:"
        f" {pool.mean:+.5f} ± {pool.half_width:.5f}, p {pool.p:.2g}; below zero in {below};"
        f" tau {pool.tau:.4f}; a new cell ± {pool.new_cell:.4f}"
    )


def read(path: Path) -> list[Contrast]:
    """Reads a JSON list of contrasts, whose terms are [factor, sweep, method]."""
    terms = '[[1, "SWEEP", "Muon+ col_row"], [-1, "SWEEP", "Muon"]]'
    advice = f'Give a JSON list of {{"name": "...", "terms": {terms}}}.'
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for contrast in found:
            names = ("factor", "sweep", "method")
            contrast["terms"] = [dict(zip(names, t, strict=True)) for t in contrast["terms"]]
        return from_dict(list[Contrast], found)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no list of contrasts: {error}. {advice}") from None
