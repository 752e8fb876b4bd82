"""The results of sweeps as Markdown tables: those of the paper, for the runs at hand."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.errors import UserError
from examples.grid import Cell, Method
from examples.ledger import Ledger, Result

NORMS = ("col", "row", "col_row", "row_col")
POLYNOMIALS = ("you", "jordan", "polar_express")
ADAMW, MUON = Method("adamw"), Method("muon", "", "jordan")


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a folder."""

    name: str
    results: dict[Cell, Result]

    def methods(self) -> list[Method]:
        """Those that were run, in the order of the tables."""
        return sorted({cell.method for cell in self.results})

    def rates(self, method: Method) -> list[float]:
        """The rates that were tried, from the lowest."""
        return sorted({c.rate for c in self.results if c.method == method and c.seed == 0})

    def losses(self, method: Method, rate: float) -> dict[int, float]:
        """Seed to final validation loss."""
        return {
            cell.seed: result.loss
            for cell, result in sorted(self.results.items())
            if cell.method == method and cell.rate == rate
        }

    def best_rate(self, method: Method) -> float:
        """That of the lowest loss with the first seed."""
        return min(self.rates(method), key=lambda rate: self.losses(method, rate)[0])

    def best(self, method: Method) -> dict[int, float]:
        """Seed to final validation loss at the best rate."""
        return self.losses(method, self.best_rate(method))

    def best_of(self, methods: Iterable[Method]) -> Method:
        """The one of the lowest loss with the first seed, each at its best rate."""
        return min(methods, key=lambda method: self.best(method)[0])

    def gaps(self, method: Method, other: Method) -> list[float]:
        """Losses of one less the other's, each at its best rate, by seed.

        Runs of one seed have the same first parameters and batches.
        """
        own, its = self.best(method), self.best(other)
        return [own[seed] - its[seed] for seed in own if seed in its]

    def at_edge(self, method: Method) -> bool:
        """Whether a rate that was not tried may be better."""
        rates = self.rates(method)
        return len(rates) > 1 and self.best_rate(method) in (rates[0], rates[-1])

    def curve(self, method: Method) -> list[tuple[int, float]]:
        """Step and validation loss at the best rate, mean over seeds."""
        rate = self.best_rate(method)
        curves = [
            result.val
            for cell, result in self.results.items()
            if cell.method == method and cell.rate == rate
        ]
        return [
            (points[0][0], statistics.fmean(loss for _, loss in points))
            for points in zip(*curves, strict=False)
        ]

    def plus(self, frobenius: str = "free") -> list[Method]:
        """Muon+ in each norm that was run: as the paper has it, or with Muon's Frobenius norm."""
        wanted = [Method("muonplus", norm, "jordan", frobenius) for norm in NORMS]
        return [method for method in wanted if method in self.methods()]

    def against_muon(self) -> list[Method]:
        """What is compared with Muon: the best norm of each of these two, where both were run."""
        kinds = [self.plus(), self.plus("matched")] if MUON in self.methods() else []
        return [self.best_of(methods) for methods in kinds if methods]


def read(folder: Path) -> Sweep:
    """The sweep that was run in a folder."""
    results = Ledger(folder).results()
    if not results:
        raise UserError(f"{folder} has no finished runs: give the folder of a sweep.")
    return Sweep(folder.name, results)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """A table, whose columns after the first are on the right if they have numbers."""
    lines = [head, ["---", *["---:" if numbers else "---"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def perplexity(losses: Iterable[float]) -> float:
    """Mean over seeds."""
    return statistics.fmean(math.exp(min(loss, 700.0)) for loss in losses)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation if there is more than one."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def ppl(losses: Iterable[float]) -> str:
    """Perplexity of some runs, in a cell of a table."""
    losses = list(losses)
    return f"{perplexity(losses):.2f}" if all(map(math.isfinite, losses)) else "diverged"


def best_of_each(sweep: Sweep) -> str:
    """Every method at its own best rate; the difference is between runs of one seed."""
    rows = []
    for method in sweep.methods():
        best = sweep.best(method)
        rows.append(
            [
                method.name,
                rate_of(sweep, method),
                spread(list(best.values()), 4),
                spread([math.exp(min(loss, 700.0)) for loss in best.values()], 2),
                difference(sweep, method, MUON),
                str(len(best)),
            ]
        )
    head = ["method", "rate", "validation loss", "perplexity", "loss - Muon's", "seeds"]
    return markdown(head, rows)


def difference(sweep: Sweep, method: Method, other: Method) -> str:
    """How much lower the loss is, seed by seed, in a cell of a table."""
    if other not in sweep.methods() or method == other:
        return ""
    return spread(sweep.gaps(method, other), 4)


def gains(sweeps: Sequence[Sweep]) -> str:
    """Muon and the best Muon+ of each sweep, each at its best rate; differences seed by seed.

    Muon+ with Muon's Frobenius norm has a row of its own.
    """
    rows = []
    for sweep in sweeps:
        for plus in sweep.against_muon():
            cells = [
                cell
                for method in (MUON, plus)
                for cell in (rate_of(sweep, method), spread(list(sweep.best(method).values()), 4))
            ]
            norm = f"{plus.norm} matched norm" if plus.frobenius == "matched" else plus.norm
            rows.append([sweep.name, *cells, norm, difference(sweep, plus, MUON)])
    head = ["sweep", "Muon's rate", "Muon", "Muon+'s rate", "Muon+", "norm", "Muon+ - Muon"]
    return markdown(head, rows)


def rate_of(sweep: Sweep, method: Method) -> str:
    """The best rate, with a star if it is at the edge."""
    return f"{sweep.best_rate(method):g}{'*' if sweep.at_edge(method) else ''}"


def by_norm(sweeps: Sequence[Sweep]) -> str:
    """The paper's table "Best validation perplexity under different normalization directions"."""
    rows = []
    for sweep in sweeps:
        found = {method.norm: ppl(sweep.best(method).values()) for method in sweep.plus()}
        muon = ppl(sweep.best(MUON).values()) if MUON in sweep.methods() else ""
        rows.append([sweep.name, muon, *(found.get(norm, "") for norm in NORMS)])
    return markdown(["model", "none", *NORMS], rows)


def by_rate(sweep: Sweep) -> str:
    """The paper's full sweep, with the first seed; the best of each row is bold."""
    methods = [method for method in (MUON, *sweep.plus()) if method in sweep.methods()]
    rates = sorted({rate for method in methods for rate in sweep.rates(method)})
    rows = []
    for rate in rates:
        losses = [sweep.losses(method, rate).get(0) for method in methods]
        best = min(loss for loss in losses if loss is not None)
        cells = ["" if loss is None else ppl([loss]) for loss in losses]
        marked = [
            f"**{text}**" if loss == best < math.inf else text
            for text, loss in zip(cells, losses, strict=True)
        ]
        rows.append([f"{rate:g}", *marked])
    return markdown(["rate", *(method.norm or "none" for method in methods)], rows)


def adamw_rates(sweep: Sweep) -> str:
    """AdamW alone, which has rates of its own."""
    rates = sweep.rates(ADAMW)
    return markdown(
        ["rate", *(f"{rate:g}" for rate in rates)],
        [["perplexity", *(ppl([sweep.losses(ADAMW, rate)[0]]) for rate in rates)]],
    )


def by_polar(sweeps: Sequence[Sweep], orthos: Sequence[str]) -> str:
    """The paper's ablation of the polar step: Muon and the best Muon+ with each."""
    rows = []
    for sweep in sweeps:
        for ortho in orthos:
            muon = Method("muon", "", ortho)
            plus = [
                m
                for m in sweep.methods()
                if (m.optimizer, m.ortho, m.frobenius) == ("muonplus", ortho, "free")
            ]
            if muon not in sweep.methods() or not plus:
                continue
            best = sweep.best_of(plus)
            pair = [sweep.best(method).values() for method in (muon, best)]
            gap = perplexity(pair[1]) - perplexity(pair[0])
            rows.append([sweep.name, ortho, *map(ppl, pair), f"{gap:+.2f}", best.norm])
    return markdown(["model", "polar step", "Muon", "Muon+", "difference", "norm"], rows)


def by_size(sweeps: Sequence[Sweep]) -> str:
    """The paper's table "Matching Frobenius norm": Muon+ with the norm of its input."""
    rows = []
    for sweep in sweeps:
        for method in sweep.plus():
            matched = Method("muonplus", method.norm, "jordan", "matched")
            if matched in sweep.methods():
                muon = ppl(sweep.best(MUON).values()) if MUON in sweep.methods() else ""
                both = [ppl(sweep.best(one).values()) for one in (method, matched)]
                rows.append([sweep.name, method.norm, muon, *both])
    return markdown(["model", "norm", "Muon", "Muon+", "Muon+ with Muon's norm"], rows)


def steps_to(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Where a curve first comes down to a loss, on straight lines between its points."""
    steps, losses = np.transpose(np.asarray(curve, float))
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return float(steps[0])
    return float(np.interp(target, losses[[first, first - 1]], steps[[first, first - 1]]))


def to_the_same_loss(sweeps: Sequence[Sweep]) -> str:
    """The paper's table "Training cost required to reach a target loss", by validation loss."""
    rows = []
    for sweep in sweeps:
        if MUON not in sweep.methods() or not math.isfinite(sweep.best(MUON)[0]):
            continue
        total, target = sweep.curve(MUON)[-1]
        for method in sweep.plus():
            steps = steps_to(sweep.curve(method), target)
            reached = "not reached" if steps is None else f"{steps:.0f}"
            faster = "" if steps is None else f"{100 * (total / steps - 1):+.1f}%"
            rows.append([sweep.name, f"{target:.4f}", str(total), method.norm, reached, faster])
    head = ["model", "target loss", "Muon steps", "Muon+ norm", "Muon+ steps", "speed-up"]
    return markdown(head, rows)


def sections(sweeps: Sequence[Sweep]) -> Iterable[tuple[str, str]]:
    """Title and text of each table that has rows."""
    for sweep in sweeps:
        yield f"{sweep.name}: each method at its best rate", best_of_each(sweep)
    several = [s for s in sweeps if len({m.ortho for m in s.methods()} & set(POLYNOMIALS)) > 1]
    together: list[tuple[str, Callable[[], str]]] = [
        ("Muon+ against Muon, each at its best rate", lambda: gains(sweeps)),
        ("Perplexity by norm, each at its best rate", lambda: by_norm(sweeps)),
        (
            "Perplexity by polynomial, each at its best rate",
            lambda: by_polar(several, POLYNOMIALS),
        ),
        ("Perplexity with the exact polar factor", lambda: by_polar(sweeps, ("svd",))),
        ("Perplexity with matched Frobenius norm", lambda: by_size(sweeps)),
        ("Steps to Muon's final validation loss", lambda: to_the_same_loss(sweeps)),
    ]
    for title, table in together:
        if table().count("\n") > 1:
            yield title, table()
    for sweep in sweeps:
        if sweep.plus() or MUON in sweep.methods():
            yield f"{sweep.name}: perplexity by rate, first seed", by_rate(sweep)
        if ADAMW in sweep.methods():
            yield f"{sweep.name}: AdamW by rate, first seed", adamw_rates(sweep)
