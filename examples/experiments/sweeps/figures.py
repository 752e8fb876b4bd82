"""Figures of sweeps."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import ADAMW, MUON, Sweep
from examples.trainer.runs.report import BLUE, INK, ORANGE, save_figure
from examples.trainer.training.evaluate import perplexity

# The other colours of Okabe and Ito; markers differ too, for print in grey.
GREEN, SKY, YELLOW, PURPLE = "#009E73", "#56B4E9", "#E69F00", "#CC79A7"
STYLES = {
    ADAMW: (YELLOW, "v"),
    MUON: (INK, "o"),
    Method("muonplus", "col", "jordan", "free"): (SKY, "<"),
    Method("muonplus", "row", "jordan", "free"): (BLUE, ">"),
    Method("muonplus", "col_row", "jordan", "free"): (ORANGE, "s"),
    Method("muonplus", "row_col", "jordan", "free"): (GREEN, "D"),
    Method("muonplus", "col_row", "jordan", "matched"): (PURPLE, "P"),
}
ACROSS = 2  # panels in a row: a page shows them without making letters small


def panels(sweeps: Sequence[Sweep], rows: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """A figure with `rows` panels for each sweep; many sweeps are wrapped into bands."""
    n, across = len(sweeps), min(len(sweeps), ACROSS)
    bands = -(-n // across)
    size = (1 + 4.3 * across, 0.4 + 3.8 * rows * bands)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows * bands, across, squeeze=False).tolist()
    grid = [[axes[i // across * rows + row][i % across] for i in range(n)] for row in range(rows)]
    for band in axes[-rows:]:
        for unused in band[n - across * (bands - 1) :]:
            unused.remove()
    return figure, grid


def plot_rates(sweeps: Sequence[Sweep], path: Path) -> None:
    """Perplexity of the first seed against the learning rate, for each method.

    AdamW has separate axes, since its rates and losses have another magnitude.
    """
    adamw = any(ADAMW in sweep.methods() for sweep in sweeps)
    figure, grid = panels(sweeps, rows=1 + adamw)
    for row, wanted in zip(grid, (False, True), strict=False):
        for axes, sweep in zip(row, sweeps, strict=True):
            methods = [method for method in drawn(sweep) if (method == ADAMW) == wanted]
            rates = sorted({rate for method in methods for rate in sweep.rates(method)})
            for method in methods:
                first = sweep.first_seed
                losses = [(rate, sweep.losses(method, rate)[first]) for rate in sweep.rates(method)]
                points = [(rate, perplexity(loss)) for rate, loss in losses if loss < math.inf]
                colour, mark = STYLES[method]
                axes.plot(*columns(points), color=colour, marker=mark, label=method.name)
            axes.set(xscale="log", xlabel="peak learning rate", title=sweep.name)
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=60)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_ylabel("validation perplexity")
        row[-1].legend(frameon=False)
    save_figure(figure, path)


def plot_curves(sweeps: Sequence[Sweep], path: Path) -> None:
    """Validation loss by step, and below it the difference from Muon."""
    figure, (above, below) = panels(sweeps, rows=2)
    for axes, gaps, sweep in zip(above, below, sweeps, strict=True):
        muon = dict(sweep.curve(MUON)) if MUON in sweep.methods() else {}
        for method in drawn(sweep):
            colour, mark = STYLES[method]
            curve = sweep.curve(method)
            label = f"{method.name}, rate {sweep.best_rate(method):g}"
            axes.plot(*columns(curve), color=colour, marker=mark, markersize=4, label=label)
            if method.optimizer != "adamw":
                gap = [(step, loss - muon[step]) for step, loss in curve if step in muon]
                gaps.plot(*columns(gap), color=colour, marker=mark, markersize=4)
        axes.set(title=sweep.name)
        gaps.set(xlabel="step")
        axes.legend(frameon=False)
        for one in (axes, gaps):
            one.grid(alpha=0.3)
    above[0].set_ylabel("validation loss (nats per token)")
    below[0].set_ylabel("difference from Muon")
    save_figure(figure, path)


def plot_gains(sweeps: Sequence[Sweep], path: Path) -> None:
    """Loss of Muon+ minus that of Muon, each at its best rate: mean and deviation over seeds."""
    figure = Figure(figsize=(7, 1.4 + 0.4 * len(sweeps)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.0, color=INK, linewidth=1)
    kinds = {"free": ("Muon+", ORANGE, "s", -0.12), "matched": ("matched norm", PURPLE, "P", 0.12)}
    for frobenius, (label, colour, mark, height) in kinds.items():
        gaps = {index + height: gap for index, gap in gaps_of(sweeps, frobenius).items()}
        means = [statistics.fmean(gap) for gap in gaps.values()]
        deviations = [statistics.stdev(gap) if len(gap) > 1 else 0.0 for gap in gaps.values()]
        points = axes.errorbar(means, list(gaps), xerr=deviations, fmt=mark, color=colour)
        points.set_label(label)
    axes.set_yticks(range(len(sweeps)), [sweep.name for sweep in sweeps])
    axes.set_ylim(len(sweeps) - 0.5, -0.5)
    axes.set_xlabel("validation loss less Muon's (nats per token): below zero Muon+ is better")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    save_figure(figure, path)


def gaps_of(sweeps: Sequence[Sweep], frobenius: str) -> dict[int, list[float]]:
    """Index of a sweep to its differences from Muon by seed, if all of them are finite."""
    gaps = {
        index: sweep.gaps(plus, MUON)
        for index, sweep in enumerate(sweeps)
        for plus in sweep.against_muon()
        if plus.frobenius == frobenius
    }
    return {index: gap for index, gap in gaps.items() if all(map(math.isfinite, gap))}


def drawn(sweep: Sweep) -> list[Method]:
    """The methods of a sweep that the figures show, those of STYLES."""
    return [method for method in STYLES if method in sweep.methods()]


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
