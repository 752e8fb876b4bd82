"""Behaviour above the best rate, by the plan of `steadier`: `python -m lab.steadiness`."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from scipy import stats

from examples.trainer.runs.metrics import GRADIENT_NORM, METRICS
from examples.trainer.system import files
from examples.trainer.system.errors import UserError, command
from lab.sweeps.contrasts import Estimate, estimate
from lab.sweeps.grid import Method, Trial
from lab.sweeps.ledger import Ledger, Result
from lab.sweeps.results import markdown

STEADIER = Path("lab/results/experiments/steadier")
STEPS = "steps.jsonl"  # beside the ledger; the runs' own folders are not committed
SETTLED, WINDOW, SPIKE, GAIN = 50, 20, 0.1, 0.01  # steps, steps, nats, nats: the plan's numbers


@dataclass(frozen=True)
class Steps:
    """Measures of a run that its evaluations do not show."""

    spikes: int
    """Steps after `SETTLED` whose loss is `SPIKE` above the median of the `WINDOW` before."""
    gradient: float
    """The 99.9th percentile of the gradient's norm before clipping, after `SETTLED`."""


def measured(records: Sequence[Mapping[str, Any]]) -> Steps:
    """Reads the training steps of `metrics.jsonl`. A step that was skipped is a spike."""
    steps = {r["step"]: r for r in records if "train_loss" in r or "skipped" in r}
    losses = [steps[step].get("train_loss", math.inf) for step in sorted(steps)]
    norms = [r[GRADIENT_NORM] for step, r in steps.items() if step > SETTLED and GRADIENT_NORM in r]
    spikes = sum(
        losses[i] > statistics.median(losses[i - WINDOW : i]) + SPIKE
        for i in range(SETTLED, len(losses))
    )
    return Steps(spikes, float(np.percentile(norms, 99.9)))


def keep(sweep: Path) -> dict[Trial, Steps]:
    """The measures of a sweep; those of runs on this machine are added to the file."""
    known = {
        Trial(Method(**r["method"]), r["rate"], r["seed"]): Steps(r["spikes"], r["gradient"])
        for r in files.read_json_lines(sweep / STEPS)
    }
    for trial in Ledger(sweep).results():
        metrics = sweep / "runs" / trial.name / METRICS
        if trial not in known and metrics.exists():
            known[trial] = measured(files.read_json_lines(metrics))
    lines = [
        json.dumps(dataclasses.asdict(t) | dataclasses.asdict(known[t])) + "\n"
        for t in sorted(known, key=lambda t: (t.method, t.rate, t.seed))
    ]
    files.write_atomically(sweep / STEPS, "".join(lines).encode())
    return known


@dataclass(frozen=True)
class Run:
    """All measures of a run."""

    steps: Steps
    lost: float
    """Last held-out loss, less that of the same method and seed at the lowest rate, in nats."""
    crossings: int
    """Evaluations at which it is below that run after it was above."""


def compared(result: Result, best: Result, steps: Steps) -> Run:
    """The measures of a run beside that of the same method and seed at the lowest rate."""
    above = [loss > other for (_, loss), (_, other) in zip(result.val, best.val, strict=False)]
    crossings = sum(was and not now for was, now in itertools.pairwise(above))
    return Run(steps, result.loss - best.loss, crossings)


Cells = dict[tuple[Method, float], dict[tuple[str, int], Run]]
"""Runs by method and rate, as a multiple of the lowest; then by model and seed."""


def read(folder: Path) -> Cells:
    """Reads the sweeps of a folder, one for each model."""
    cells: Cells = {}
    for ledger in sorted(folder.glob("*/runs.jsonl")):
        results, steps = Ledger(ledger.parent).results(), keep(ledger.parent)
        lowest = min(trial.rate for trial in results)
        for trial, result in results.items():
            best = results.get(dataclasses.replace(trial, rate=lowest))
            if best and trial in steps:
                cell = cells.setdefault((trial.method, round(trial.rate / lowest, 6)), {})
                cell[ledger.parent.name, trial.seed] = compared(result, best, steps[trial])
    if not cells:
        raise UserError(f"{folder} has no finished runs: give the folder of sweeps.")
    return cells


@dataclass(frozen=True)
class Verdict:
    """Whether one method is steadier than another at a rate."""

    lost: Estimate
    more_spikes: float
    """p of a one-sided sign test that its spikes are more."""

    @property
    def steadier(self) -> bool:
        """Whether less is lost, by more than `GAIN`, and spikes are not more."""
        less = self.lost.mean < -GAIN and self.lost.mean + self.lost.half_width < 0
        return less and self.more_spikes > 0.05


def verdict(one: Mapping[Any, Run], other: Mapping[Any, Run]) -> Verdict:
    """Compares runs of two methods at a rate, paired by model and seed."""
    pairs = [(one[key], other[key]) for key in sorted(one) if key in other]
    more = sum(a.steps.spikes > b.steps.spikes for a, b in pairs)
    less = sum(a.steps.spikes < b.steps.spikes for a, b in pairs)
    p = stats.binomtest(more, more + less, alternative="greater").pvalue if more + less else 1.0
    return Verdict(estimate([a.lost - b.lost for a, b in pairs]), float(p))


def means(method: Method, rate: float, runs: Sequence[Run]) -> list[str]:
    """A row of the table of measures."""
    figures = zip(
        *((r.lost, r.steps.spikes, r.steps.gradient, r.crossings) for r in runs), strict=True
    )
    return [
        method.name,
        f"{rate:g}",
        str(len(runs)),
        *(f"{statistics.fmean(f):.4g}" for f in figures),
    ]


def judged(cells: Cells) -> Iterator[list[str]]:
    """The rows of the table of verdicts, at more than twice the rate."""
    for (one, rate), (other, same) in itertools.permutations(sorted(cells), 2):
        if rate == same and rate > 2:
            found = verdict(cells[one, rate], cells[other, rate])
            lost = f"{found.lost.mean:+.4f} ± {found.lost.half_width:.4f}"
            word = "steadier" if found.steadier else "not shown"
            yield [
                f"{one.name} against {other.name}",
                f"{rate:g}",
                lost,
                f"{found.more_spikes:.3f}",
                word,
            ]


def write(folder: Annotated[Path, tyro.conf.Positional] = STEADIER) -> str:
    """Writes the measures of each method and rate, then which of two methods is steadier.

    Args:
      folder: has a sweep for each model. Measures of steps are kept in its `steps.jsonl`.
    """
    cells = read(folder)
    head = ["method", "times the rate", "runs", "lost", "spikes", "gradient", "crossings"]
    pairs = ["pair", "times the rate", "lost, 95%", "p of more spikes", "verdict"]
    measures = [
        means(method, rate, list(cells[method, rate].values())) for method, rate in sorted(cells)
    ]
    return f"{markdown(head, measures)}\n\n{markdown(pairs, judged(cells))}"


main = command(write, "lab.steadiness")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
