"""The picture of a run, drawn from its metrics."""

from typing import IO, Any

from matplotlib.figure import Figure  # not pyplot, which may try to open a window

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito: distinguishable with any colour vision


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
    figure.savefig(file, format="png", dpi=150)
