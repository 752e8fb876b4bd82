"""Losses of several methods at several learning rates: two tables and a picture."""

import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure  # not pyplot, which may try to open a window

from examples.trainer.runs.report import INK, save_figure
from examples.trainer.system import tables

# Okabe and Ito: distinguishable with any colour vision; marks and lines differ too, for grey print.
STYLES = (
    (INK, "o", "-"),
    ("#E69F00", "v", "-"),
    ("#D55E00", "s", "-"),
    ("#0072B2", "D", "-"),
    ("#009E73", "x", "--"),
    ("#CC79A7", "P", "--"),
)


class Run(NamedTuple):
    """One training."""

    method: str
    rate: float
    seed: int


Losses = dict[Run, float]
"""The validation loss of each run, infinite where the training diverged."""


def methods_of(losses: Losses) -> list[str]:
    """Lists the methods in the order of the runs."""
    return list(dict.fromkeys(run.method for run in losses))


def seeds_of(losses: Losses) -> list[int]:
    """Lists the seeds in the order of the runs."""
    return list(dict.fromkeys(run.seed for run in losses))


def means(losses: Losses, method: str) -> dict[float, float]:
    """Averages over seeds at each rate of a method."""
    rates = sorted({run.rate for run in losses if run.method == method})
    seeds = seeds_of(losses)
    return {
        rate: statistics.fmean(losses[Run(method, rate, seed)] for seed in seeds) for rate in rates
    }


def rate_by_rate(losses: Losses, base: str) -> str:
    """Writes mean losses at each rate; in brackets the difference to the base's at it."""
    found = {method: means(losses, method) for method in methods_of(losses)}
    lines = []
    for rate in sorted({rate for column in found.values() for rate in column}):
        cells = [
            compared(column.get(rate), None if method == base else found[base].get(rate))
            for method, column in found.items()
        ]
        lines.append([f"{rate:g}", *cells])
    return tables.markdown(["rate", *found], lines, left=0)


def best_against_best(losses: Losses, base: str) -> str:
    """Writes the lowest loss of each method and seed, its rate, and the difference to the base's.

    A star marks a rate at an end of those that were tried: one beyond it may be better.
    """
    seeds = seeds_of(losses)
    head = ["best of its rates", *(f"seed {seed}" for seed in seeds), "mean", "difference"]
    base_best = [best(losses, base, seed)[0] for seed in seeds]
    lines = []
    for method in methods_of(losses):
        found = [best(losses, method, seed) for seed in seeds]
        cells = [
            compared(loss, None if method == base else other, f" at {rate:g}{star}")
            for (loss, rate, star), other in zip(found, base_best, strict=True)
        ]
        mean = statistics.fmean(loss for loss, *_ in found)
        gap = mean - statistics.fmean(base_best)
        shown = f"{gap:+.4f}" if method != base and math.isfinite(gap) else ""
        lines.append([method, *cells, compared(mean), shown])
    return tables.markdown(head, lines)


def best(losses: Losses, method: str, seed: int) -> tuple[float, float, str]:
    """Finds the lowest loss of a method in a seed, its rate, and a star at an end of the rates."""
    found = {
        run.rate: loss for run, loss in losses.items() if (run.method, run.seed) == (method, seed)
    }
    rate = min(found, key=found.__getitem__)
    return found[rate], rate, "*" if rate in (min(found), max(found)) else ""


def compared(loss: float | None, other: float | None = None, at: str = "") -> str:
    """Writes a loss, and in brackets its difference to another; nothing where there is none."""
    if loss is None:
        return ""
    written = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
    gap = math.nan if other is None else loss - other
    return f"{written}{at}{f' ({gap:+.4f})' if math.isfinite(gap) else ''}"


def draw(losses: Losses, path: Path, which_rate: str) -> None:
    """Draws mean loss against rate for each method, with a dot for each seed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(STYLES)
    for method, (colour, mark, line) in zip(methods_of(losses), styles, strict=False):
        points = means(losses, method).items()  # a run that diverged is infinite, and so not drawn
        axes.plot(*zip(*points, strict=True), line, color=colour, marker=mark, label=method)
        runs = [(run.rate, loss) for run, loss in losses.items() if run.method == method]
        axes.scatter(*zip(*runs, strict=True), color=colour, marker=".", s=14, alpha=0.6)
    rates = sorted({run.rate for run in losses})
    axes.set(xscale="log", xlabel=which_rate, ylabel="validation loss (nats a character)")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    seeds = len(seeds_of(losses))
    axes.set_title(f"Validation loss by rate: means of {seeds} seeds, and a dot for each seed")
    save_figure(figure, path)
