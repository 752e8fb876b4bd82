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

# Time or collectives of an update by Optax and here (README's table of updates).
COSTS = (
    ("12 layers of LLaMA-1B, one H100", 119.9, 57.2, "ms"),
    ("GPT-Small, one H100", 16.4, 4.6, "ms"),
    ("six layers of width 384, two CPU cores", 875, 441, "ms"),
    ("collectives, 12 layers on 4 x 2 devices", 1466, 2, ""),
)
# Model and text, tokens per parameter, loss minus that of a tuned Muon, half of a 95% interval
# (docs/explain/evidence.md); a mean of the rows above it has no tokens.
CELLS = (
    ("nanoGPT 0.8 M, Shakespeare", 1.9, -0.0190, 0.0049),
    ("GPT 0.24 M, Python's library", 1.7, -0.0151, 0.0073),
    ("GPT 10.5 M, Python packages", 2, -0.0111, 0.0134),
    ("GPT 0.24 M, separate Q, K and V, Python's library", 1.7, -0.0097, 0.0070),
    ("GPT 0.24 M, Python packages", 1.7, -0.0086, 0.0109),
    ("LLaMA 0.36 M, Python's library", 1.1, -0.0028, 0.0025),
    ("LLaMA 0.36 M, Python packages", 1.1, -0.0019, 0.0047),
    ("these seven together", None, -0.0096, 0.0060),
    ("GPT 0.24 M, Python packages", 20, 0.0043, 0.0097),
    ("LLaMA 0.36 M, Python packages", 20, 0.0082, 0.0078),
    ("these two together", None, 0.0063, 0.0065),
    ("GPT 0.24 M, packages, 8,192 tokens per step", 20, 0.0154, 0.0094),
    ("LLaMA 0.36 M, packages, 8,192 tokens per step", 20, -0.0016, 0.0033),
    ("these two together", None, 0.0069, 0.0048),
)


def _grid(axes: Axes, entries: np.ndarray, left: float, top: float, colour: str) -> None:
    """Draws entries as squares, the larger the darker, and the norm of each row as a bar."""
    largest, norms = np.abs(entries).max(), np.linalg.norm(entries, axis=1)
    for (row, column), value in np.ndenumerate(entries):
        alpha = 0.08 + 0.92 * abs(value) / largest
        corner = (left + column, top + row)
        axes.add_patch(Rectangle(corner, 0.92, 0.92, color=colour, alpha=alpha, lw=0))
    for row, norm in enumerate(norms):
        length, corner = 1.8 * norm / norms.max(), (left + 4.3, top + row + 0.25)
        axes.add_patch(Rectangle(corner, length, 0.45, color=INK, lw=0))


def method() -> Figure:
    """A momentum matrix of eight rows on its way through the chain, two stages a line."""
    random = np.random.default_rng(3)
    momentum = random.normal(size=(8, 4)) * np.exp(random.normal(size=(8, 1)))
    polar = np.asarray(omp.polar.svd(momentum.astype(np.float32)))
    normalized = np.asarray(omp.matrices.Normalize("row_col", match_frobenius=False)(polar))
    normalized = normalized * (np.linalg.norm(polar) / np.linalg.norm(normalized))
    stages = (
        ("1. momentum", "β M + (1 - β) G", momentum, SOFT, "average of gradients G"),
        ("2. polar factor", "U Vᵀ", polar, ONE, "all singular values are 1"),
        ("3. normalization", "Norm(U Vᵀ)", normalized, TWO, "rows nearly equal: Muon+"),
        ("4. scale", "√max(1, out/in)", normalized * 2**0.5, THREE, "then the learning rate"),
    )
    figure, axes = plt.subplots(figsize=(4.6, 5.2))
    for index, (name, formula, entries, colour, note) in enumerate(stages):
        left, top = 14 * (index % 2), 14.5 * (index // 2)
        axes.text(left + 3, top - 2.1, name, ha="center", weight="bold")
        axes.text(left + 3, top - 0.7, formula, ha="center", color=SOFT)
        _grid(axes, entries, left, top, colour)
        axes.text(left + 3, top + 9.4, note, ha="center", color=SOFT, size=9)
    note = "Each bar is the norm of a row, the step of one output unit."
    axes.text(10, 26.2, note, ha="center", size=9)
    axes.set(xlim=(-3.5, 23.5), ylim=(26.5, -3.2))
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


def cost() -> Figure:
    """What an update costs beside Optax's."""
    figure, axes = plt.subplots(figsize=(4.6, 2.9))
    for row, (name, optax, ours, unit) in enumerate(COSTS):
        axes.barh(row, 1, 0.5, color=FAINT)
        axes.barh(row, ours / optax, 0.5, color=ONE)
        axes.text(1.02, row, f"{optax:,g} {unit}", va="center", color=SOFT)
        axes.text(ours / optax + 0.02, row, f"{ours:g} {unit}", va="center", weight="bold")
        axes.text(0, row - 0.34, name)
    axes.set(xlim=(0, 1.22), ylim=(len(COSTS) - 0.6, -0.75))
    axes.axis("off")
    axes.set_title("Blue: an update here. Grey: Optax's Muon", size=10, loc="left")
    figure.tight_layout()
    return figure


def loss() -> Figure:
    """Final losses beside a tuned Muon's."""
    figure, axes = plt.subplots(figsize=(4.6, 6.8))
    edge = 0.0265
    for row, (name, tokens, mean, half) in enumerate(CELLS):
        colour, size, weight = (ONE, 5, "normal") if tokens else (THREE, 7, "bold")
        axes.errorbar(mean, row, xerr=half, color=colour, marker="o", ms=size, lw=1.6)
        axes.text(-edge, row - 0.36, name, weight=weight)
        if tokens:
            axes.text(edge, row - 0.36, f"{tokens:g}", ha="right")
    axes.text(edge, -1.05, "tokens per\nparameter", ha="right", color=SOFT)
    axes.axvline(0, 0, 0.94, color=SOFT, lw=0.8, zorder=0)
    axes.set(xlim=(-edge, edge), ylim=(len(CELLS) - 0.4, -1.6), yticks=[])
    axes.set_xticks([-0.02, -0.01, 0, 0.01, 0.02], ["-0.02", "-0.01", "0", "0.01", "0.02"])
    for words, side, align in (("← omp.muonplus is better", -1, "right"), ("worse →", 1, "left")):
        axes.text(0.0006 * side, len(CELLS) + 0.75, words, ha=align)
    axes.spines[:].set_visible(False)
    axes.tick_params(color=SOFT, labelcolor=INK)
    axes.set_title("Loss minus a tuned Muon's, nats, 95% intervals", size=10, loc="left")
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


DRAWINGS = {"method": method, "layouts": layouts, "cost": cost, "loss": loss, "moves": moves}


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
         "text.color": INK, "font.size": 10}
    )  # fmt: skip
    for name, draw in DRAWINGS.items():
        text = svg_of(draw())
        (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/_static/{name}.svg: {len(text)} bytes")


if __name__ == "__main__":
    main()
