"""The results of a finished run: a picture, a sample of text, and a few lines of numbers."""

import statistics
from pathlib import Path
from typing import Any

from examples.runs.metrics import METRICS, read_metrics
from examples.runs.plots import plot_losses
from examples.runs.speed import MFU, speed_of

SMOOTHED = 20  # steps averaged for the reported training loss, since single batches are noisy


def write_results(folder: Path, sample: str) -> str:
    """Writes `losses.png` and `sample.txt`; returns the summary."""
    records = read_metrics(folder / METRICS)
    plot_losses(records, folder.name, folder / "losses.png")
    (folder / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    return summary(records)


def summary(records: list[dict[str, Any]]) -> str:
    """The results of a run in a few lines."""
    train = [record["train_loss"] for record in records if "train_loss" in record][-SMOOTHED:]
    speeds = [rate for rate in map(speed_of, records) if rate is not None]
    used = [record[MFU] for record in records if MFU in record]
    val = next(record for record in reversed(records) if "val_loss" in record)
    lines = [
        f"training loss    {statistics.fmean(train):.4f}  (mean of the last {len(train)} steps)",
        f"validation loss  {val['val_loss']:.4f}",
        f"perplexity       {val['val_perplexity']:.2f}",
        f"bits per byte    {val['val_bits_per_byte']:.4f}",
    ]
    if speeds:
        lines.append(f"tokens/s         {statistics.median(speeds):,.0f}  (median of the steps)")
    if used:
        lines.append(f"MFU              {statistics.median(used):.1f}%  (median of the steps)")
    return "\n".join(lines)
