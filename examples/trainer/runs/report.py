"""The results of a finished run: a picture, a sample of text, and a few lines of numbers."""

import io
import statistics
from pathlib import Path
from typing import IO, Any

import jax
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which may try to open a window
from matplotlib.text import Text
from tokenizers import Tokenizer

from examples.trainer.data.tokenizer import end_id, ids_of
from examples.trainer.models.language_model import Forward
from examples.trainer.models.sampling import DEFAULT, Sampling, sample_ids
from examples.trainer.runs.metrics import METRICS, MFU, TOKENS_PER_SECOND, read_metrics
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically
from examples.trainer.training.evaluate import short

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


VAL_LOSS = "val_loss"
SMOOTHED = 20  # steps averaged for the reported training loss, since single batches are noisy


def write_results(folder: Path, sample: str) -> tuple[str, float]:
    """Writes `losses.png` and `sample.txt`; returns the summary and the last validation loss."""
    path = folder / METRICS
    records = read_metrics(path)
    if {VAL_LOSS, "train_loss"} - set().union(*records):
        raise UserError(
            f"{path} has no losses, though the run is finished: was it removed or replaced while "
            "the run was going? The checkpoints are complete; put the file back and resume to get "
            "the results."
        )
    picture = io.BytesIO()
    plot_losses(records, folder.name, picture)
    write_atomically(folder / "losses.png", picture.getvalue())
    write_atomically(folder / "sample.txt", f"{sample}\n".encode(errors="replace"))
    return summary(records), next(r[VAL_LOSS] for r in reversed(records) if VAL_LOSS in r)


def summary(records: list[dict[str, Any]]) -> str:
    train = [record["train_loss"] for record in records if "train_loss" in record][-SMOOTHED:]
    speeds = [record[TOKENS_PER_SECOND] for record in records if TOKENS_PER_SECOND in record]
    used = [record[MFU] for record in records if MFU in record]
    val = next(record for record in reversed(records) if VAL_LOSS in record)
    lines = [
        f"training loss    {statistics.fmean(train):.4f}  (mean of the last {len(train)} steps)",
        f"validation loss  {val[VAL_LOSS]:.4f}",
        f"perplexity       {short(val['val_perplexity'])}",
        f"bits per byte    {val['val_bits_per_byte']:.4f}",
    ]
    if speeds:
        lines.append(f"tokens/s         {statistics.median(speeds):,.0f}  (median of the steps)")
    if used:
        lines.append(f"MFU              {statistics.median(used):.1f}%  (median of the steps)")
    return "\n".join(lines)


def sample_text(
    forward: Forward,
    params: optax.Params,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    model: ModelConfig,
    key: jax.Array,
    sampling: Sampling = DEFAULT,
) -> str:
    ids = [end_id(tokenizer), *ids_of(tokenizer, [prompt])[0]]
    new = sample_ids(forward, params, ids, tokens, model, key, sampling)
    return tokenizer.decode(ids[1:] + new)
