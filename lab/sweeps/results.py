"""The results of a finished sweep: losses and best rates by method, and their table."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.trainer.system.errors import UserError
from lab.sweeps.grid import Method, Trial
from lab.sweeps.ledger import Ledger, Result

ADAMW, MUON = Method("adamw"), Method("muon", "", "jordan")


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a folder."""

    name: str
    results: dict[Trial, Result]

    def methods(self) -> list[Method]:
        return sorted({trial.method for trial in self.results})

    @property
    def first_seed(self) -> int:
        return min(trial.seed for trial in self.results)

    def rates(self, method: Method) -> list[float]:
        """The rates that were tried with the first seed, in increasing order."""
        first = self.first_seed
        return sorted({t.rate for t in self.results if t.method == method and t.seed == first})

    def losses(self, method: Method, rate: float) -> dict[int, float]:
        """Final validation loss by seed."""
        return {
            trial.seed: result.loss
            for trial, result in sorted(self.results.items())
            if trial.method == method and trial.rate == rate
        }

    def best_rate(self, method: Method) -> float:
        """The rate with the lowest mean loss of the seeds that every rate was run with."""
        seeds = self.choosing_seeds(method)

        def mean(rate: float) -> float:
            losses = self.losses(method, rate)
            return statistics.fmean(losses[seed] for seed in seeds)

        return min(self.rates(method), key=mean)

    def choosing_seeds(self, method: Method) -> set[int]:
        """The seeds that every rate was run with, which choose the best rate."""
        return set.intersection(*(set(self.losses(method, r)) for r in self.rates(method)))

    def best(self, method: Method) -> dict[int, float]:
        """Final validation loss by seed, at the best rate."""
        return self.losses(method, self.best_rate(method))

    def fresh(self, method: Method) -> dict[int, float]:
        """Final validation loss at the best rate, by the seeds that had no part in its choice.

        Where there is one rate, nothing was chosen here.
        """
        chose = self.choosing_seeds(method) if len(self.rates(method)) > 1 else set()
        return {seed: loss for seed, loss in self.best(method).items() if seed not in chose}

    def gaps(self, method: Method, other: Method) -> list[float]:
        """Loss of one method minus that of another, each at its best rate, by seed.

        Runs with the same seed have the same initial parameters and batches.
        """
        first, second = self.best(method), self.best(other)
        return [first[seed] - second[seed] for seed in first if seed in second]

    def at_edge(self, method: Method) -> bool:
        """Whether the best rate is the lowest or highest that was tried."""
        rates = self.rates(method)
        return len(rates) > 1 and self.best_rate(method) in (rates[0], rates[-1])


def read(folder: Path) -> Sweep:
    results = Ledger(folder).results()
    if not results:
        raise UserError(f"{folder} has no finished runs: give the folder of a sweep.")
    return Sweep(folder.name, results)


def spread(values: Iterable[float]) -> str:
    """Writes the mean, and the standard deviation if there is more than one value."""
    values = list(values)
    if not all(map(math.isfinite, values)):
        return "diverged"
    deviation = [f"{statistics.stdev(values):.4f}"] if len(values) > 1 else []
    return " ± ".join([f"{statistics.fmean(values):.4f}", *deviation])


def table(sweep: Sweep) -> str:
    """Writes losses, and differences from Muon's runs with the same seed.

    A star marks a best rate that is the lowest or highest of those tried.
    """
    rows, has_muon = [], MUON in sweep.methods()
    for method in sweep.methods():
        losses = sweep.best(method).values()
        rate = f"{sweep.best_rate(method):g}{'*' if sweep.at_edge(method) else ''}"
        gap = spread(sweep.gaps(method, MUON)) if has_muon and method != MUON else ""
        rows.append([method.name, rate, spread(losses), gap, str(len(losses))])
    head = [sweep.name, "rate", "validation loss", "loss - Muon's", "seeds"]
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown; the first columns, ``left`` of them, hold words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rows])
