"""The picture of a run, drawn from its metrics."""

from pathlib import Path
from typing import IO, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which may try to open a window
from matplotlib.text import Text

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: distinguishable with any colour vision
INK = "#7d858e"  # words and lines that are read on white and on black


def save_figure(figure: Figure, target: Path | IO[bytes], **options: Any) -> None:
    """Writes a figure without a ground, for pages that are light or dark."""
    for words in figure.findobj(Text):
        words.set(color=INK)
    for axes in figure.findobj(Axes):
        axes.tick_params(which="both", color=INK, labelcolor=INK)
        for spine in axes.spines.values():
            spine.set(edgecolor=INK)
    figure.savefig(target, dpi=150, transparent=True, **options)


def plot_losses(records: list[dict[str, Any]], title: str, file: IO[bytes]) -> None:
    train = [(r["step"], r["train_loss"]) for r in records if "train_loss" in r]
    val = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color=BLUE, linewidth=1, alpha=0.7, label="training")
    if val:
        label = f"validation, at the end {val[-1][1]:.3f}"
        axes.plot(*zip(*val, strict=True), color=ORANGE, marker="o", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, file, format="png")
