"""Differences between methods, which may be of several sweeps, with intervals by paired seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from scipy import stats

from examples.experiments.sweeps import results
from examples.experiments.sweeps.results import Sweep
from examples.trainer.system import files, tables
from examples.trainer.system.errors import UserError


@dataclass(frozen=True)
class Term:
    """A method at its best rate, times a factor."""

    factor: float
    sweep: str
    method: str


@dataclass(frozen=True)
class Contrast:
    """A sum of terms, whose factors add up to zero, and what was said of it before the runs."""

    name: str
    terms: tuple[Term, ...]
    refuted_if: str = ""
    fresh: bool = False
    """Whether seeds that chose a rate are left out."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval, and how likely so large a one is by chance."""

    mean: float
    half_width: float
    p: float
    seeds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates the mean of independent values by Student's t."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Estimate(mean, math.inf, 1.0, n)
    error = statistics.stdev(values) / math.sqrt(n)
    if not error:
        return Estimate(mean, 0.0, float(mean == 0), n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return Estimate(mean, half, float(2 * stats.t.sf(abs(mean) / error, n - 1)), n)


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
    """Writes a line for each contrast; Holm's correction is over those that were run."""
    contrasts = list(contrasts)
    sweeps = sweeps_of(contrasts, root)
    found: dict[str, Estimate] = {}
    missing: dict[str, str] = {}
    for contrast in contrasts:
        try:
            found[contrast.name] = estimate(values(contrast, sweeps))
        except UserError as error:
            missing[contrast.name] = str(error)
    corrected = dict(zip(found, holm([e.p for e in found.values()]), strict=True))
    rows = []
    for contrast in contrasts:
        if e := found.get(contrast.name):
            # Pages have three digits: of fewer than five the last would be rounded twice.
            numbers = [f"{e.mean:+.5f} ± {e.half_width:.5f}", f"{e.p:.2g}"]
            rows.append([contrast.name, *numbers, f"{corrected[contrast.name]:.2g}", str(e.seeds)])
        else:
            rows.append([contrast.name, missing[contrast.name], "", "", ""])
        rows[-1].append(contrast.refuted_if)
    head = ["difference of losses", "mean, 95%", "p", "p (Holm)", "seeds", "refuted if"]
    return tables.markdown(head, rows, padded=False)


def read(path: Path) -> list[Contrast]:
    """Reads a JSON list of contrasts, whose terms are [factor, sweep, method]."""
    terms = '[[1, "SWEEP", "Muon+ col_row"], [-1, "SWEEP", "Muon"]]'
    advice = f'Give a JSON list of {{"name": "...", "terms": {terms}}}.'
    with files.parsing(path, "is no list of contrasts", advice):
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for contrast in found:
            names = ("factor", "sweep", "method")
            contrast["terms"] = [dict(zip(names, t, strict=True)) for t in contrast["terms"]]
        return pydantic.TypeAdapter(list[Contrast]).validate_python(found)
