"""The paper's figures of imbalance, each drawn from the numbers in its JSON file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.experiments.paper.records import kinds
from examples.experiments.sweeps.figures import GREEN, PURPLE, SKY, YELLOW
from examples.trainer.runs.report import BLUE, INK, ORANGE, save_figure

METHODS = {
    "Muon": (INK, "o"),
    "Muon polar_express": (YELLOW, "v"),
    "NorMuon": (SKY, "<"),
    "Turbo-Muon": (GREEN, "D"),
    "AdaMuon": (BLUE, ">"),
    "Muon+ col_row": (ORANGE, "s"),
}
STYLES = {
    "qkv": (INK, "o"),  # where it is, there is no query
    "query": (INK, "o"),
    "key": (BLUE, "s"),
    "value": (SKY, "<"),
    "out": (GREEN, "D"),
    "gate": (YELLOW, "^"),
    "up": (ORANGE, "v"),
    "down": (PURPLE, ">"),
}
WIDTH, ACROSS = 9.6, 4  # inches that a page shows without making letters small; axes in a row
SIDE = {"row": "rows (output units)", "col": "columns (input features)"}


def plot_iterations(data: Mapping[str, Any], path: Path) -> None:
    """Variance against the number of Newton-Schulz steps; bars at the right: exact factors."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    for axes, (side, title) in zip(figure.subplots(1, 2, sharey=True), SIDE.items(), strict=True):
        lowest = max(min(v for kind in kinds(data) for v in data[kind][side]) / 3, 1e-12)
        for kind in kinds(data):
            colour, mark = STYLES[kind]
            out, in_ = data[kind]["shape"]
            label = f"{kind}, {out} x {in_}"
            counts = data["iterations"]
            axes.plot(counts, data[kind][side], color=colour, marker=mark, ms=4, label=label)
            exact = data[kind][f"exact_{side}"]
            if exact > lowest:
                axes.axhline(exact, 0.96, 1, color=colour, linewidth=3)
        axes.axvline(5, color="grey", linewidth=1, linestyle=":")
        axes.set(yscale="log", xlabel="Newton-Schulz steps", title=title)
        axes.set_xticks(range(0, counts[-1] + 1, 5))
        axes.grid(alpha=0.3)
    axes.plot([], [], color="grey", linewidth=3, label="bars: exact factor, if on the axis")
    axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("variance of squared norms")
    save_figure(figure, path)


def plot_training(data: Mapping[str, Any], path: Path) -> None:
    """Relative variance during training, a column for each kind of matrix."""
    names = [name for name in METHODS if name in data]

    def draw(axes: Axes, kind: str, side: str) -> None:
        for name in names:
            colour, mark = METHODS[name]
            mean = np.array(data[name][kind][side]["mean"], float)
            steps = data[name]["steps"]
            axes.plot(steps, mean, color=colour, marker=mark, ms=3, linewidth=1, label=name)
        axes.set(yscale="log")

    figure = by_kind_and_side(kinds(data[names[0]]), "relative variance of", 6, draw)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, path)


def by_kind_and_side(
    shown: Sequence[str], label: str, height: float, draw: Callable[[Axes, str, str], None]
) -> Figure:
    """Axes for each kind of matrix and side, by step; `draw` fills each. Few stand in a row."""
    bands = -(-len(shown) // ACROSS)
    figure = Figure(figsize=(WIDTH, height * bands), layout="constrained")
    grid = figure.subplots(2 * bands, ACROSS, sharex=True, sharey=True, squeeze=False)
    for index, kind in enumerate(shown):
        band, column = divmod(index, ACROSS)
        for row, side in enumerate(SIDE, start=2 * band):
            draw(axes := grid[row, column], kind, side)
            axes.grid(alpha=0.3)
            if column == 0:
                axes.set_ylabel(f"{label}\n{SIDE[side]}")
        grid[2 * band, column].set_title(kind)
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    for unused in grid[-2:, len(shown) - ACROSS * (bands - 1) :].flat:
        unused.remove()
    return figure


def plot_entries(data: Mapping[str, Any], title: str, path: Path) -> None:
    """Magnitudes of the entries of an update, before and after the normalization.

    Output units are sorted by their norm under Muon, so that the picture shows how norms differ.
    """
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    arrays = {name: np.array(rows, float) for name, rows in data.items()}
    order = np.argsort(np.linalg.norm(arrays["Muon"], axis=1))
    top = max(x.max() for x in arrays.values())
    for i, (name, x) in enumerate(arrays.items()):
        axes: Any = figure.add_subplot(1, len(arrays), i + 1, projection="3d")
        rows, columns = np.indices(x.shape)
        surface = {"cmap": "viridis", "vmin": 0, "vmax": top, "linewidth": 0}
        axes.plot_surface(columns, rows, x[order], rcount=200, ccount=200, **surface)
        axes.set(
            xlabel="input feature", ylabel="output unit, by norm", zlabel="|entry|", zlim=(0, top)
        )
        axes.set_title(name)
        axes.view_init(elev=28, azim=-55)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.pane.set_alpha(0)
    figure.suptitle(title)
    save_figure(figure, path)


def plot_rank_correlations(data: Mapping[str, Any], path: Path) -> None:
    """Spearman's correlation during training, mean and deviation over layers, by kind."""

    def draw(axes: Axes, kind: str, side: str) -> None:
        mean, std = (np.array(data[kind][side][name], float) for name in ("mean", "std"))
        axes.fill_between(data["steps"], mean - std, mean + std, color=SKY, alpha=0.4)
        axes.plot(data["steps"], mean, color=BLUE)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylim(-0.5, 1.05)

    save_figure(by_kind_and_side(kinds(data), "Spearman correlation,", 5, draw), path)


def plot_regions(data: Mapping[str, Any], path: Path) -> None:
    """Above, g' of each step; below, where the steps up to each one drive eigenvalues apart."""
    names = [name for name in data if name != "lambda"]
    figure = Figure(figsize=(WIDTH, 6), layout="constrained")
    above, below = figure.subplots(2, len(names), squeeze=False)
    for slopes, strips, name in zip(above, below, names, strict=True):
        draw_slopes(slopes, data["lambda"], data[name])
        slopes.set_title(name)
        for n, parts in enumerate(data[name]["composed"], start=1):
            for part, colour in (("amplification", ORANGE), ("reduction", SKY)):
                ends = [(max(a, 1e-6), b - max(a, 1e-6)) for a, b in parts[part] if b > 1e-6]
                strips.broken_barh(ends, (n - 0.4, 0.8), color=colour)
        strips.set(xscale="log", xlim=(1e-6, 1), xlabel=r"eigenvalue $\lambda$ at the start")
        strips.invert_yaxis()
        strips.set_yticks(range(1, len(data[name]["composed"]) + 1))
    above[0].set_ylabel(r"$g'(\lambda)$ of each step")
    below[0].set_ylabel("steps so far\n(orange: driven apart, blue: together)")
    save_figure(figure, path)


def draw_slopes(axes: Axes, grid: list[float], data: Mapping[str, Any]) -> None:
    """Draws g' of each distinct step and the thresholds; a single step is shaded beyond them."""
    count = len(data["slopes"])
    for i, slope in enumerate(data["slopes"]):
        alpha = 1 - 0.7 * i / max(count - 1, 1)
        label = f"step {i + 1}"
        axes.plot(grid, slope, color=INK, alpha=alpha, linewidth=1.2, label=label)
    if count == 1:
        for a, b in data["steps"][0]["amplification"]:
            axes.axvspan(a, b, color=ORANGE, alpha=0.25, linewidth=0)
    else:
        axes.legend(frameon=False, fontsize=7, loc="upper center", ncols=2)
    for threshold in (-1, 1):
        axes.axhline(threshold, color=BLUE, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 1), ylim=(-4, 9), xlabel=r"$\lambda$")
    axes.grid(alpha=0.3)
