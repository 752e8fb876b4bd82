"""Losses of several methods at several learning rates: two tables and a picture."""

import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure  # not pyplot, which may try to open a window

from examples.trainer.system import tables

# Okabe and Ito: distinguishable with any colour vision; marks and lines differ too, for grey print.
STYLES = (
    ("#000000", "o", "-"),
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
    """The methods, in the order in which they come."""
    return list(dict.fromkeys(run.method for run in losses))


def seeds_of(losses: Losses) -> list[int]:
    """The seeds, in the order in which they come."""
    return list(dict.fromkeys(run.seed for run in losses))


def means(losses: Losses, method: str) -> dict[float, float]:
    """The mean over seeds at each rate of a method."""
    rates = sorted({run.rate for run in losses if run.method == method})
    seeds = seeds_of(losses)
    return {
        rate: statistics.fmean(losses[Run(method, rate, seed)] for seed in seeds) for rate in rates
    }


def rate_by_rate(losses: Losses, base: str) -> str:
    """Mean losses at each rate, in Markdown; in brackets the difference to the base's at it."""
    columns = {method: means(losses, method) for method in methods_of(losses)}
    lines = []
    for rate in sorted({rate for column in columns.values() for rate in column}):
        cells = []
        for method, column in columns.items():
            compared = method != base and rate in column and rate in columns[base]
            difference = column[rate] - columns[base][rate] if compared else math.nan
            cells.append(f"{written(column.get(rate))}{in_brackets(difference)}")
        lines.append([f"{rate:g}", *cells])
    return tables.markdown(["rate", *columns], lines, left=0)


def best_against_best(losses: Losses, base: str) -> str:
    """The lowest loss of each method and seed, its rate, and the difference to the base's lowest.

    A star marks a rate at an end of those that were tried: one beyond it may be better.
    """
    seeds = seeds_of(losses)
    head = ["best of its rates", *(f"seed {seed}" for seed in seeds), "mean", "difference"]
    lines = []
    base_mean = statistics.fmean(best(losses, base, seed).loss for seed in seeds)
    for method in methods_of(losses):
        cells = []
        for seed in seeds:
            found, of_base = best(losses, method, seed), best(losses, base, seed)
            difference = math.nan if method == base else found.loss - of_base.loss
            star = "*" if found.at_an_end else ""
            at = f"{written(found.loss)} at {found.rate:g}{star}"
            cells.append(f"{at}{in_brackets(difference)}")
        mean = statistics.fmean(best(losses, method, seed).loss for seed in seeds)
        gap = signed(mean - base_mean) if method != base else ""
        lines.append([method, *cells, written(mean), gap])
    return tables.markdown(head, lines)


class Best(NamedTuple):
    """The lowest loss over the rates."""

    loss: float
    rate: float
    at_an_end: bool


def best(losses: Losses, method: str, seed: int) -> Best:
    """The lowest loss of a method in a seed."""
    found = {
        run.rate: loss for run, loss in losses.items() if (run.method, run.seed) == (method, seed)
    }
    rate = min(found, key=found.__getitem__)
    return Best(found[rate], rate, rate in (min(found), max(found)))


def written(loss: float | None) -> str:
    """A loss as a cell; nothing where none was measured."""
    if loss is None:
        return ""
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def signed(difference: float) -> str:
    """A difference with its sign; nothing where there is none."""
    return f"{difference:+.4f}" if math.isfinite(difference) else ""


def in_brackets(difference: float) -> str:
    """A difference behind a loss."""
    return f" ({signed(difference)})" if math.isfinite(difference) else ""


def draw(losses: Losses, path: Path, which_rate: str) -> None:
    """Draws mean loss against rate for each method, with a dot for each seed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(STYLES)
    for method, (colour, mark, line) in zip(methods_of(losses), styles, strict=False):
        points = means(losses, method).items()  # what diverged is infinite, and so not drawn
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
    figure.savefig(path, dpi=150)
