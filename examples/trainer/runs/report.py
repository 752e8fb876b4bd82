"""The results of finished runs: pictures, a sample of text, and a few lines of numbers."""

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which may try to open a window
from matplotlib.text import Text

from examples.trainer.runs.metrics import ADAM_RATE, LEARNING_RATE, METRICS, VAL_LOSS
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import read_json_lines, write_atomically

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: distinguishable with any colour vision
INK = "#7d858e"  # words and lines that are read on white and on black
SMOOTHED = 20  # steps averaged for a training loss, since single batches are noisy
LINES = f"lines: training, mean of {SMOOTHED} steps; points: validation"

Curve = dict[int, float]
"""Step to loss, in nats per token."""


def curve(records: Sequence[dict[str, Any]], name: str) -> Curve:
    return {record["step"]: record[name] for record in records if name in record}


def smooth(losses: Curve) -> Curve:
    """The mean of each loss and those before it."""
    values = list(losses.values())
    means = (statistics.fmean(values[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(values)))
    return dict(zip(losses, means, strict=True))


def save(figure: Figure, path: Path) -> None:
    """Writes a figure without a ground, for pages that are light or dark."""
    for words in figure.findobj(Text):
        words.set(color=INK)
    for axes in figure.findobj(Axes):
        axes.grid(alpha=0.3)
        axes.tick_params(which="both", color=INK, labelcolor=INK)
        for spine in axes.spines.values():
            spine.set(edgecolor=INK)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, transparent=True)
    write_atomically(path, picture.getvalue())


def draw_losses(records: Sequence[dict[str, Any]], title: str) -> Figure:
    """Losses above, and the learning rates below."""
    train, val = curve(records, "train_loss"), curve(records, VAL_LOSS)
    figure = Figure(figsize=(7, 5.2), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    axes.plot([*train], [*train.values()], color=BLUE, linewidth=1, alpha=0.7, label="training")
    label = f"validation, at the end {[*val.values()][-1]:.3f}"
    axes.plot([*val], [*val.values()], color=ORANGE, marker="o", label=label)
    axes.set(ylabel="loss (nats per token)", title=title)
    axes.legend(frameon=False)
    matrices, rest = curve(records, LEARNING_RATE), curve(records, ADAM_RATE)
    below.plot([*matrices], [*matrices.values()], color=BLUE, label="matrices")
    if rest != matrices:
        below.plot([*rest], [*rest.values()], color=ORANGE, label="others")
        below.legend(frameon=False)
    below.set(xlabel="step", ylabel="rate")
    return figure


def write_results(folder: Path, sample: str) -> tuple[str, float]:
    """Writes `losses.png` and `sample.txt`; returns the summary and the last validation loss."""
    records = read_json_lines(folder / METRICS)
    train, val = ([r for r in records if name in r] for name in ("train_loss", VAL_LOSS))
    if not (train and val):
        raise UserError(
            f"{folder / METRICS} lacks the figures of the run: put it back, or resume from an "
            "earlier checkpoint by removing the newest."
        )
    save(draw_losses(records, folder.name), folder / "losses.png")
    write_atomically(folder / "sample.txt", f"{sample}\n".encode(errors="replace"))
    losses, last = [record["train_loss"] for record in train[-SMOOTHED:]], val[-1]
    return (
        f"training loss    {statistics.fmean(losses):.4f}  (mean of the last {len(losses)} steps)\n"
        f"validation loss  {last[VAL_LOSS]:.4f}\n"
        f"perplexity       {last['val_perplexity']:.5g}\n"
        f"bits per byte    {last['val_bits_per_byte']:.4f}"
    ), last[VAL_LOSS]


def compare(folders: Sequence[Path], titles: tuple[str, str]) -> str:
    """Draws the curves of two runs into the folder of the first; returns what they ended at."""
    records = [read_json_lines(folder / METRICS) for folder in folders]
    val = [curve(one, VAL_LOSS) for one in records]
    first, second = (next(reversed(one.values())) for one in val)
    path = folders[0] / "against.png"
    save(draw_both([smooth(curve(one, "train_loss")) for one in records], val, titles), path)
    return (
        f"\nvalidation loss  {titles[0]} {first:.4f}, {titles[1]} {second:.4f}: a difference of"
        f" {first - second:+.4f} with one seed\npicture          {path}"
    )


def draw_both(train: Sequence[Curve], val: Sequence[Curve], titles: tuple[str, str]) -> Figure:
    """Losses above, and the first run's minus the second's below."""
    figure = Figure(figsize=(7, 5.6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for title, color, smoothed, evaluated in zip(titles, (BLUE, ORANGE), train, val, strict=True):
        above.plot([*smoothed], [*smoothed.values()], color=color, alpha=0.7)
        above.plot([*evaluated], [*evaluated.values()], "o", color=color, label=title)
    for (one, other), style in ((train, "-"), (val, "o")):
        steps = [step for step in one if step in other]
        below.plot(steps, [one[step] - other[step] for step in steps], style, color=BLUE)
    below.axhline(0, color=ORANGE, linewidth=1)
    above.set(ylabel="loss (nats per token)", title=LINES)
    below.set(xlabel="step", ylabel=f"{titles[0]} - {titles[1]}")
    above.legend(frameon=False)
    return figure
