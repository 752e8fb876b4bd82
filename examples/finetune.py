"""Fine-tunes a small model with LoRA on another text: Muon+ against AdamW, over rates and seeds.

`python -m examples.finetune FOLDER` trains GPTs on the source code of Python's standard library,
one with AdamW and one with Muon+, exports them, and adapts each to the prose of Python's reference
(`pydoc_data.topics`, which the first text leaves out). It prints the last validation loss on the
prose by rule and rate: the mean over seeds, and the largest distance of a seed from it.
"""

import contextlib
import io
import pydoc_data.topics
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tyro

from examples import export, train
from examples.trainer.runs.metrics import read_metrics
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import command

PRETRAINING = {
    "adamw": ("--optimizer.learning-rate", "0.005", "--optimizer.adam-learning-rate", "0.005"),
    "muonplus": ("--optimizer.learning-rate", "0.02", "--optimizer.adam-learning-rate", "0.01"),
}
RULES = {
    "adamw": ("--optimizer.name", "adamw"),
    "muonplus on B": ("--optimizer.name", "muonplus"),
    "muonplus on both": ("--optimizer.name", "muonplus", "--optimizer.lora-matrices", "both"),
}
BOTH = ("gpt-micro", "--model.final-norm", "layer", "--optimizer.weight-decay", "0")


def compare(
    folder: tyro.conf.Positional[Path],
    steps: int = 400,
    tuned_steps: int = 150,
    width: int = 64,
    rank: int = 4,
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1),
    seeds: tuple[int, ...] = (0, 1, 2),
) -> str:
    """Compares rules of LoRA on two pretrained models.

    Args:
      folder: where runs and exports go; a run that is there is not done again.
      steps: of pre-training.
      tuned_steps: of fine-tuning.
      width: of the model.
      rank: of the adapters.
      rates: learning rates of all adapters.
      seeds: of the fine-tuning, for adapters and the order of the text.
    """
    folder /= f"{steps}-{tuned_steps}-steps-width-{width}-rank-{rank}"  # other settings, other runs
    folder.mkdir(parents=True, exist_ok=True)
    prose = folder / "prose.txt"
    prose.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    lines = []
    for pretrained in PRETRAINING:
        weights = pretrain(folder, pretrained, steps, width)
        lora = ("--init-from", str(weights), "--lora.rank", str(rank), "--data.paths", str(prose))
        lines += table(folder, pretrained, (*lora, "--steps", str(tuned_steps)), rates, seeds)
    return "\n".join(lines)


def pretrain(folder: Path, name: str, steps: int, width: int) -> Path:
    """Trains a model with a rule and returns the folder of its export."""
    size = ("--steps", str(steps), "--model.d-model", str(width))
    run_once(folder, name, (*size, "--optimizer.name", name, *PRETRAINING[name]))
    weights = folder / f"{name}-weights"
    if not weights.exists():
        quietly(export.main, [str(folder / name), str(weights)])
    return weights


def table(
    folder: Path,
    pretrained: str,
    flags: tuple[str, ...],
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[str]:
    """Fine-tunes a model by each rule, rate and seed; yields lines of a Markdown table."""
    yield f"| pretrained with {pretrained} | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "|---" * (len(rates) + 1) + "|"
    for rule, choice in RULES.items():
        cells = []
        for rate in rates:
            peaks = ("--optimizer.learning-rate", "--optimizer.adam-learning-rate")
            given = (*flags, *choice, *(word for flag in peaks for word in (flag, f"{rate:g}")))
            found = [
                run_once(
                    folder,
                    f"{pretrained}-{rule.replace(' ', '-')}-{rate:g}-{seed}",
                    (*given, "--seed", str(seed)),
                )
                for seed in seeds
            ]
            mean = statistics.fmean(found)
            cells.append(f"{mean:.3f} ± {max(abs(x - mean) for x in found):.3f}")
        yield f"| {rule} | " + " | ".join(cells) + " |"


def run_once(folder: Path, name: str, flags: Sequence[str]) -> float:
    """Does a run unless it was done; returns its last validation loss."""
    run = folder / name
    if not (run / "sample.txt").exists():
        shutil.rmtree(run, ignore_errors=True)  # what was stopped is short enough to begin again
        quietly(train.main, [*BOTH, *flags, "--runs-dir", str(folder), "--name", name])
    records = read_metrics(run / "metrics.jsonl")
    return [record["val_loss"] for record in records if "val_loss" in record][-1]


def quietly(command: Callable[[list[str]], int], argv: list[str]) -> None:
    """Runs a command of the trainer without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        status = command(argv)
    if status:
        raise UserError(f"this command failed with status {status}: {' '.join(argv)}")


main = command(compare, "examples.finetune")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
