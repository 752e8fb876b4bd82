"""The runs of a sweep: which there are, what each one changes, and which remain to be done."""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from examples.trainer.settings.run import TITLES as TITLES_OF_RULES
from examples.trainer.settings.run import Name as Rule
from examples.trainer.settings.run import Norm, RunConfig
from examples.trainer.settings.validation import STRICT, Count

FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# A polynomial, with a number of steps if it is not --optimizer.ns-steps; or the exact factor.
ORTHO = re.compile(r"svd|(?P<coeffs>jordan|you|polar_express|cubic)(-(?P<steps>[1-9]\d?))?")


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is varied: all methods x rates with the first seeds, then further seeds.

    Further seeds are run at the best rate of each method only. Without flags Muon+ has the norm of
    the library's default.
    """

    __pydantic_config__ = STRICT

    optimizers: tuple[Rule, ...] = ("adamw", "muon", "muonplus")
    """Update rules of the matrices."""
    norms: tuple[Norm, ...] = ("row_col",)
    """Normalizations of muonplus."""
    rates: tuple[FinitePositive, ...] = (0.01, 0.014, 0.02, 0.028, 0.04)
    """Peak learning rates of the matrices under all but the optimizers of adam_rates."""
    adam_rates: tuple[FinitePositive, ...] = (0.0005, 0.001, 0.002, 0.004, 0.008)
    """The same under adamw, whose updates are larger."""
    orthos: tuple[str, ...] = ("jordan",)
    """Polar steps: jordan, you, polar_express or cubic, with --optimizer.ns-steps polynomials or
    with three in jordan-3; or svd for the exact one."""
    frobenius: tuple[Literal["free", "matched"], ...] = ("matched",)
    """matched: the normalized update of muonplus gets the Frobenius norm it had before."""
    first_seed: Annotated[int, Field(ge=0)] = 0
    """Where seeds begin."""
    seeds: Count = 1
    """How many; those after the first chosen_by are run at each method's best rate only."""
    chosen_by: Count = 1
    """First seeds, whose mean loss chooses the best rate: all rates are run with each of them."""
    start: float | None = None
    """Run this rate and its two neighbours first, and one further while the best is an outer one.
    None: run all rates."""

    @pydantic.model_validator(mode="after")
    def fitting(self) -> "Grid":
        """Refuses a polar step or a first rate that does not exist."""
        for ortho in self.orthos:
            polar_step(ortho)
        for method in methods(self) if self.start is not None else ():
            if self.start not in rates(self, method):
                raise ValueError(f"--grid.start {self.start:g} is no rate of {method.name}")
        return self


VARIED = {
    "name": "optimizers",
    "norm": "norms",
    "match_frobenius": "frobenius",
    "ns_coeffs": "orthos",
    "learning_rate": "rates",
}
"""Fields of OptimizerConfig that a grid sets, and the fields of Grid that list their values."""

TITLES = {
    **TITLES_OF_RULES,
    "normuon": "NorMuon",
    "adamuon": "AdaMuon",
    "turbo_muon": "Turbo-Muon",
    "mano": "Mano",
    "optax_muon": "Optax Muon",
    "aurora": "Aurora",
    "hyperball": "MuonH",
    "muoneq": "MuonEq",
    "muoneq_max": "MuonEq max",
    "meqmuon": "MeqMuon",
    "muown": "Muown",
}
"""What contrasts and tables call the optimizers of ledgers, also those that the trainer lost."""


@dataclasses.dataclass(frozen=True, order=True)
class Method:
    """An update rule without its rate: a row of the tables."""

    optimizer: str
    norm: str = ""
    ortho: str = ""
    frobenius: str = ""

    @property
    def name(self) -> str:
        rule = TITLES.get(self.optimizer, self.optimizer)
        ortho = "" if self.ortho in ("", "jordan") else self.ortho
        matched = "matched norm" if self.frobenius == "matched" else ""
        return " ".join(filter(None, (rule, self.norm, ortho, matched)))


@dataclasses.dataclass(frozen=True, order=True)
class Trial:
    """One run."""

    method: Method
    rate: float
    seed: int

    @property
    def name(self) -> str:
        parts = (*dataclasses.astuple(self.method), f"{self.rate:g}", f"seed{self.seed}")
        return "-".join(filter(None, parts))


def methods(grid: Grid) -> Iterator[Method]:
    """Lists the rows of the grid, each once."""
    for optimizer in dict.fromkeys(grid.optimizers):
        if optimizer not in ("muon", "muonplus"):
            yield Method(optimizer)
            continue
        norms, frobenius = (grid.norms, grid.frobenius) if optimizer == "muonplus" else ([""], [""])
        for ortho, norm, size in itertools.product(grid.orthos, norms, frobenius):
            yield Method(optimizer, norm, ortho, size)


def rates(grid: Grid, method: Method) -> tuple[float, ...]:
    return grid.adam_rates if method.optimizer == "adamw" else grid.rates


def all_seeds(grid: Grid) -> range:
    return range(grid.first_seed, grid.first_seed + grid.seeds)


def choosing(grid: Grid) -> range:
    """The seeds that choose a rate."""
    return all_seeds(grid)[: grid.chosen_by]


def wanted(grid: Grid, losses: dict[Trial, float]) -> Iterator[Trial]:
    """Lists the runs known to be needed, in order; `losses` has those of the finished ones.

    Further rates and seeds are known only when the rates before them have finished. There are no
    further seeds of a method that diverges at all rates.
    """
    for method in methods(grid):
        tried, new = [], first_rates(grid, method)
        while new:
            first = [Trial(method, r, seed) for r in new for seed in choosing(grid)]
            yield from first
            if any(trial not in losses for trial in first):
                break
            tried += new
            loss, best = min((mean_loss(losses, grid, method, rate), rate) for rate in tried)
            new = further_rates(rates(grid, method), tried, best)
        else:
            further = all_seeds(grid)[grid.chosen_by :] if loss < math.inf else ()
            yield from (Trial(method, best, seed) for seed in further)


def mean_loss(losses: dict[Trial, float], grid: Grid, method: Method, rate: float) -> float:
    """Averages over the seeds that choose a rate, all of which have finished."""
    return statistics.fmean(losses[Trial(method, rate, s)] for s in choosing(grid))


def first_rates(grid: Grid, method: Method) -> list[float]:
    """Lists the rates that are run whatever the losses are."""
    ladder = sorted(rates(grid, method))
    if grid.start is None:
        return list(rates(grid, method))
    middle = ladder.index(grid.start)
    return ladder[max(0, middle - 1) : middle + 2]


def further_rates(all_rates: Iterable[float], tried: list[float], best: float) -> list[float]:
    """Gives the next rate beyond the best one, if that is an outer one of those tried."""
    ladder, place = sorted(all_rates), sorted(tried).index(best)
    beyond = [ladder.index(best) - 1] if place == 0 else []
    beyond += [ladder.index(best) + 1] if place == len(tried) - 1 else []
    return [ladder[i] for i in beyond if 0 <= i < len(ladder) and ladder[i] not in tried]


def count(grid: Grid, losses: dict[Trial, float]) -> int:
    """Counts the runs: with a start those known so far, else all if no other method diverges."""
    if grid.start is None:
        seeds = choosing(grid)
        left = [Trial(m, r, s) for m in methods(grid) for r in rates(grid, m) for s in seeds]
        losses = dict.fromkeys(left, 0.0) | losses
    return len(list(wanted(grid, losses)))


def configure(base: RunConfig, trial: Trial, runs_dir: str) -> RunConfig:
    method, rule = trial.method, base.optimizer
    rule = dataclasses.replace(
        rule,
        name=method.optimizer,
        norm=method.norm or "none",
        match_frobenius=method.frobenius == "matched",
        learning_rate=trial.rate,
        **polar_step(method.ortho),
    )
    return dataclasses.replace(
        base, optimizer=rule, seed=trial.seed, name=trial.name, runs_dir=runs_dir
    )


def polar_step(ortho: str) -> dict[str, Any]:
    found = ORTHO.fullmatch(ortho or "jordan")
    if found is None:
        raise ValueError(
            f"--grid.orthos {ortho}: give jordan, you, polar_express or cubic, alone or with a"
            " number of steps as in jordan-3; or svd"
        )
    if found["coeffs"] is None:
        return {"polar": "svd"}
    steps = {"ns_steps": int(found["steps"])} if found["steps"] else {}
    return {"ns_coeffs": found["coeffs"], **steps}
