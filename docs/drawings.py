"""Writes the pictures of README and pages: ``python -m docs.drawings`` into docs/_static.

Each picture is an SVG that follows the reader's light or dark mode.
"""

import pathlib
import re

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import optax_muonplus as omp

FOLDER = pathlib.Path(__file__).parent / "_static"
# Colours in light mode and in dark mode.
INK, SOFT, FAINT = "#1f2328", "#59636e", "#d1d9e0"
ONE, TWO, THREE, FOUR = "#0969da", "#bc4c00", "#1a7f37", "#8250df"
DARK = {
    INK: "#f0f6fc", SOFT: "#9198a1", FAINT: "#3d444d",
    ONE: "#4493f8", TWO: "#f0883e", THREE: "#3fb950", FOUR: "#ab7df8",
}  # fmt: skip

# An update's share of that of optax.contrib.muon: one H100 in bfloat16, temporary memory of 24
# layers of width 384 on a CPU, collectives of 12 layers on 4 x 2 devices: the tables of
# lab/benchmarks/README.md.
COSTS = (
    ("GPT-Small, one H100", 16.4, 4.6, "ms"),
    ("12 layers of LLaMA-1B, one H100", 119.9, 57.2, "ms"),
    ("temporary memory, 24 layers, CPU", 1047, 6, "MB"),
    ("collectives, 4 x 2 devices", 1466, 2, ""),
)
# Loss minus that of a tuned Muon, and half of a 95% interval (docs/explain/evidence.md).
CELLS = (
    ("character model 0.8 M, Shakespeare", -0.0190, 0.0049),
    ("GPT 0.24 M, standard library", -0.0151, 0.0073),
    ("GPT 10.5 M, packages", -0.0111, 0.0134),
    ("GPT 0.24 M, three projections", -0.0097, 0.0070),
    ("GPT 0.24 M, packages", -0.0086, 0.0109),
    ("LLaMA 0.36 M, standard library", -0.0028, 0.0025),
    ("LLaMA 0.36 M, packages", -0.0019, 0.0047),
)
POOLED = ("all seven, pooled", -0.0096, 0.0060)


def _grid(axes: Axes, entries: np.ndarray, left: float, colour: str) -> None:
    """Draws entries as squares, the larger the darker, and the norm of each row as a bar."""
    largest, norms = np.abs(entries).max(), np.linalg.norm(entries, axis=1)
    for (row, column), value in np.ndenumerate(entries):
        alpha = 0.08 + 0.92 * abs(value) / largest
        axes.add_patch(Rectangle((left + column, row), 0.92, 0.92, color=colour, alpha=alpha, lw=0))
    for row, norm in enumerate(norms):
        bar = Rectangle((left + 4.3, row + 0.25), 1.8 * norm / norms.max(), 0.45, color=INK, lw=0)
        axes.add_patch(bar)


def method() -> Figure:
    """A momentum matrix of eight rows on its way through the chain."""
    random = np.random.default_rng(3)
    momentum = random.normal(size=(8, 4)) * np.exp(random.normal(size=(8, 1)))
    polar = np.asarray(omp.polar.svd(momentum.astype(np.float32)))
    normalized = np.asarray(omp.matrices.Normalize("row_col", match_frobenius=False)(polar))
    normalized = normalized * (np.linalg.norm(polar) / np.linalg.norm(normalized))
    stages = (
        ("momentum", "β M + (1 - β) G", momentum, SOFT, "M: average of gradients G"),
        ("polar factor", "U Vᵀ", polar, ONE, "all singular values 1"),
        ("normalization", "Norm(U Vᵀ)", normalized, TWO, "the step that Muon+ adds"),
        ("scale", "√max(1, out/in)", normalized * 2**0.5, THREE, "then the learning rate"),
    )
    figure, axes = plt.subplots(figsize=(7.8, 2.9))
    for index, (name, formula, entries, colour, note) in enumerate(stages):
        left = 11 * index
        axes.text(left + 3, -2.2, name, ha="center", weight="bold")
        axes.text(left + 3, -0.8, formula, ha="center", color=SOFT)
        _grid(axes, entries, left, colour)
        axes.text(left + 3, 9.6, note, ha="center", color=SOFT, size=8)
        if index:
            arrow = {"arrowstyle": "->", "color": SOFT}
            axes.annotate("", (left - 0.6, 4), (left - 3.4, 4), arrowprops=arrow)
    note = "each bar is the norm of a row, the step of one output unit"
    axes.text(19.5, 11.3, note, ha="center", size=8)
    axes.set(xlim=(-2, 41.5), ylim=(11.8, -3.2))
    axes.axis("off")
    return figure


def layouts() -> Figure:
    """One row and one column of W in arrays (out, in) and in kernels (in, out)."""
    figure, axes = plt.subplots(figsize=(6.4, 2.9))
    kinds = (
        (0, (3, 5), False, "weight (out, in): PyTorch"),
        (16, (5, 3), True, "kernel (in, out): Flax"),
    )
    for left, shape, transposed, title in kinds:
        axes.text(left + 5.5, -1.4, title, ha="center", weight="bold")
        for index, name in enumerate(("a row of W", "a column of W")):
            x = left + 6.5 * index
            axes.text(x + shape[1] / 2, -0.4, name, ha="center", size=8, color=SOFT)
            for i, j in np.ndindex(shape):
                output, feature = (j, i) if transposed else (i, j)
                marked = output == 1 if index == 0 else feature == 2
                colour = ((ONE, TWO)[index]) if marked else FAINT
                axes.add_patch(Rectangle((x + j, i), 0.9, 0.9, color=colour, lw=0))
    axes.set(xlim=(-1, 28), ylim=(5.5, -2.4))
    axes.axis("off")
    return figure


def gain() -> Figure:
    """What an update costs beside Optax's, and the loss beside a tuned Muon's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.5), width_ratios=(1, 1.05))
    for row, (name, optax, ours, unit) in enumerate(COSTS):
        left.barh(row, 1, 0.62, color=FAINT)
        left.barh(row, ours / optax, 0.62, color=ONE)
        left.text(1.02, row, f"{optax:g} {unit}", va="center", color=SOFT, size=8)
        left.text(ours / optax + 0.02, row, f"{ours:g} {unit}", va="center", size=8, weight="bold")
        left.text(0, row - 0.42, name, size=8)
    left.set(xlim=(0, 1.3), ylim=(len(COSTS) - 0.4, -0.85), xticks=[], yticks=[])
    left.set_title("An update: blue omp.muonplus, grey optax.contrib.muon", size=9, loc="left")
    for row, (name, mean, half) in enumerate((*CELLS, POOLED)):
        colour, size = (THREE, 7) if row == len(CELLS) else (ONE, 5)
        right.errorbar(mean, row, xerr=half, color=colour, marker="o", ms=size, lw=1.4)
        right.text(-0.0262, row, name, va="center", ha="right", size=8)
    right.axvline(0, color=SOFT, lw=1)
    right.set(xlim=(-0.0255, 0.006), ylim=(len(CELLS) + 0.6, -0.6), yticks=[])
    right.set_xticks([-0.02, -0.01, 0], ["-0.02", "-0.01", "0"], size=8)
    right.set_title("Loss minus a tuned Muon's, nats (95% intervals)", size=9, loc="left")
    for axes in (left, right):
        axes.spines[:].set_visible(False)
        axes.tick_params(color=SOFT, labelcolor=INK)
    figure.tight_layout()
    return figure


def moves() -> Figure:
    """Four matrices in shards on four devices: whole on one device each, and back."""
    colours = (ONE, TWO, THREE, FOUR)
    figure, axes = plt.subplots(figsize=(7.6, 2.9))
    titles = ("pack", "work", "return")
    notes = ("shards of all matrices", "one whole matrix each", "shards of all updates")
    for column, title in enumerate(titles):
        x = 12 * column
        axes.text(x + 2, -1.0, title, ha="center", weight="bold")
        axes.text(x + 2, -0.4, notes[column], ha="center", color=SOFT, size=8)
        for device, part in np.ndindex(4, 4):
            matrix, piece = (device, part) if column == 1 else (part, device)
            at = x + part * (0.55 if column == 1 else 1.0) + (0.9 if column == 1 else 0)
            width = 0.55 if column == 1 else 0.75
            alpha = 0.45 + 0.18 * piece
            patch = Rectangle((at, device), width, 0.6, color=colours[matrix], alpha=alpha, lw=0)
            axes.add_patch(patch)
        if column:
            for start, end in np.ndindex(4, 4):
                colour = colours[end if column == 1 else start]
                axes.plot([x - 7.6, x - 0.5], [start + 0.3, end + 0.3], color=colour, lw=0.8)
            axes.text(x - 4, 4.5, "one all-to-all", ha="center", color=SOFT, size=8)
    for device in range(4):
        axes.text(
            -0.5, device + 0.3, f"device {device}", ha="right", va="center", color=SOFT, size=8
        )
    axes.text(14, 4.5, "polar, norms, scale", ha="center", color=SOFT, size=8)
    axes.set(xlim=(-5, 29), ylim=(5, -1.6))
    axes.axis("off")
    return figure


DRAWINGS = {"method": method, "layouts": layouts, "gain": gain, "moves": moves}


def svg_of(figure: Figure) -> str:
    """Returns the SVG, with a style for readers in dark mode and without a date."""
    path = FOLDER / "drawing.svg"
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    path.unlink()
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}'
        f'[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in DARK.items()
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda match: match[1] + style, text, count=1)


def main() -> None:
    """Writes all pictures."""
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "omp", "font.family": "sans-serif",
         "text.color": INK, "font.size": 9}
    )  # fmt: skip
    for name, draw in DRAWINGS.items():
        text = svg_of(draw())
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/_static/{name}.svg: {len(text)} bytes")


if __name__ == "__main__":
    main()
