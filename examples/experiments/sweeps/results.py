"""The results of a finished sweep: losses, best rates and curves by method."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from examples.experiments.sweeps.grid import Method, Trial
from examples.experiments.sweeps.ledger import Ledger, Result
from examples.trainer.settings.rules import Norm
from examples.trainer.system.errors import UserError

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

    def best_of(self, methods: Iterable[Method]) -> Method:
        """The method with the lowest loss of the first seed, each at its best rate."""
        return min(methods, key=lambda method: self.best(method)[self.first_seed])

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

    def curve(self, method: Method) -> list[tuple[int, float]]:
        """Step and validation loss at the best rate, mean over seeds."""
        rate = self.best_rate(method)
        curves = [
            result.val
            for trial, result in self.results.items()
            if trial.method == method and trial.rate == rate
        ]
        return [
            (points[0][0], statistics.fmean(loss for _, loss in points))
            for points in zip(*curves, strict=False)
        ]

    def plus(self, frobenius: str = "free") -> list[Method]:
        """Muon+ with each norm that was run: as in the paper, or with Muon's Frobenius norm."""
        wanted = [Method("muonplus", norm, "jordan", frobenius) for norm in get_args(Norm)]
        return [method for method in wanted if method in self.methods()]

    def against_muon(self) -> list[Method]:
        """The best norm of Muon+, and the best with Muon's Frobenius norm, if Muon was run too."""
        kinds = [self.plus(), self.plus("matched")] if MUON in self.methods() else []
        return [self.best_of(methods) for methods in kinds if methods]


def read(folder: Path) -> Sweep:
    results = Ledger(folder).results()
    if not results:
        raise UserError(f"{folder} has no finished runs: give the folder of a sweep.")
    return Sweep(folder.name, results)
