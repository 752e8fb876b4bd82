"""The results of sweeps as Markdown tables: those of the paper, for the runs at hand."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from examples.experiments.sweeps.grid import NORMS, Method
from examples.experiments.sweeps.results import ADAMW, MUON, Sweep
from examples.trainer.system import tables
from examples.trainer.training import evaluate

markdown = functools.partial(tables.markdown, padded=False)
POLYNOMIALS = ("you", "jordan", "polar_express")


def perplexities(losses: Iterable[float]) -> list[float]:
    """The perplexity of each loss; infinite where it is, which the trainer's own is not."""
    return [evaluate.perplexity(loss) if loss < math.inf else loss for loss in losses]


def spread(values: Iterable[float], digits: int) -> str:
    """Writes the mean, and the standard deviation if there is more than one value."""
    values = list(values)
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean, *deviation = (
        evaluate.short(function(values), f".{digits}f")
        for function in (statistics.fmean, statistics.stdev)[: len(values)]
    )
    return " ± ".join([mean, *deviation])


def ppl(losses: Iterable[float]) -> str:
    mean = statistics.fmean(perplexities(losses))
    return evaluate.short(mean) if mean < math.inf else "diverged"


def best_ppl(sweep: Sweep, method: Method) -> str:
    """Writes the perplexity of a method at its best rate; nothing if it was not run."""
    return ppl(sweep.best(method).values()) if method in sweep.methods() else ""


def difference(sweep: Sweep, method: Method) -> str:
    """Writes the difference of a method's losses from Muon's, by seed."""
    if MUON not in sweep.methods() or method == MUON:
        return ""
    return spread(sweep.gaps(method, MUON), 4)


def rate_of(sweep: Sweep, method: Method) -> str:
    """Writes the best rate, with a star if it is the lowest or highest that was tried."""
    return f"{sweep.best_rate(method):g}{'*' if sweep.at_edge(method) else ''}"


def best_of_each(sweep: Sweep) -> str:
    """Writes every method at its own best rate; differences are between runs of one seed."""
    rows = []
    for method in sweep.methods():
        losses = sweep.best(method).values()
        name, rate, gap = method.name, rate_of(sweep, method), difference(sweep, method)
        ppls = spread(perplexities(losses), 2)
        rows.append([name, rate, spread(losses, 4), ppls, gap, str(len(losses))])
    head = ["method", "rate", "validation loss", "perplexity", "loss - Muon's", "seeds"]
    return markdown(head, rows)


def norm_of(plus: Method) -> str:
    """Writes the normalization of a form of Muon+."""
    return f"{plus.norm} matched norm" if plus.frobenius == "matched" else plus.norm


def gains(sweeps: Sequence[Sweep]) -> str:
    """Writes Muon and the best Muon+ of each sweep, each at its best rate; differences by seed.

    Muon+ with Muon's Frobenius norm has a separate row.
    """
    rows = []
    for sweep in sweeps:
        for plus in sweep.against_muon():
            cells = [
                cell
                for method in (MUON, plus)
                for cell in (rate_of(sweep, method), spread(sweep.best(method).values(), 4))
            ]
            rows.append([sweep.name, *cells, norm_of(plus), difference(sweep, plus)])
    head = ["sweep", "Muon's rate", "Muon", "Muon+'s rate", "Muon+", "norm", "Muon+ - Muon"]
    return markdown(head, rows)


def by_norm(sweeps: Sequence[Sweep]) -> str:
    """Writes the paper's table "Best validation perplexity under different normalization..."."""
    norms = [Method("muonplus", norm, "jordan", "free") for norm in NORMS]
    rows = [[s.name, *(best_ppl(s, method) for method in (MUON, *norms))] for s in sweeps]
    return markdown(["model", "none", *NORMS], rows)


def by_rate(sweep: Sweep) -> str:
    """Writes the paper's full sweep, with the first seed; the best value of each row is bold."""
    methods = [method for method in (MUON, *sweep.plus()) if method in sweep.methods()]
    rates = sorted({rate for method in methods for rate in sweep.rates(method)})
    rows = []
    for rate in rates:
        losses = [sweep.losses(method, rate).get(sweep.first_seed) for method in methods]
        best = min(loss for loss in losses if loss is not None)
        cells = ["" if loss is None else ppl([loss]) for loss in losses]
        marked = [
            f"**{text}**" if loss == best < math.inf else text
            for text, loss in zip(cells, losses, strict=True)
        ]
        rows.append([f"{rate:g}", *marked])
    return markdown(["rate", *(method.norm or "none" for method in methods)], rows)


def adamw_rates(sweep: Sweep) -> str:
    rates = sweep.rates(ADAMW)
    return markdown(
        ["rate", *(f"{rate:g}" for rate in rates)],
        [["perplexity", *(ppl([sweep.losses(ADAMW, rate)[sweep.first_seed]]) for rate in rates)]],
    )


def by_polar(sweeps: Sequence[Sweep], orthos: Sequence[str]) -> str:
    """Writes the paper's ablation of the polar step: Muon and the best Muon+ with each."""
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
            first, second = (statistics.fmean(perplexities(losses)) for losses in pair)
            gap = evaluate.short(second - first, "+.2f") if second - first < math.inf else ""
            rows.append([sweep.name, ortho, *map(ppl, pair), gap, best.norm])
    return markdown(["model", "polar step", "Muon", "Muon+", "difference", "norm"], rows)


def by_size(sweeps: Sequence[Sweep]) -> str:
    """Writes the paper's table "Matching Frobenius norm": Muon+ with the norm of its input."""
    rows = []
    for sweep in sweeps:
        for method in sweep.plus():
            matched = dataclasses.replace(method, frobenius="matched")
            if matched in sweep.methods():
                cells = [best_ppl(sweep, one) for one in (MUON, method, matched)]
                rows.append([sweep.name, method.norm, *cells])
    return markdown(["model", "norm", "Muon", "Muon+", "Muon+ with Muon's norm"], rows)


def steps_to(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Finds where a curve, interpolated linearly, first reaches a loss; None if nowhere."""
    steps, losses = np.transpose(np.asarray(curve, float))
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return float(steps[0])
    return float(np.interp(target, losses[[first, first - 1]], steps[[first, first - 1]]))


def to_the_same_loss(sweeps: Sequence[Sweep]) -> str:
    """Writes the paper's table "Training cost required to reach a target loss".

    The mean curve of a method ends where its first seed diverges: then it has no final loss.
    """
    rows = []
    for sweep in sweeps:
        if MUON not in sweep.methods() or math.inf in sweep.best(MUON).values():
            continue
        total, target = sweep.curve(MUON)[-1]
        for method in (*sweep.plus(), *sweep.plus("matched")):
            diverged = math.inf in sweep.best(method).values()
            steps = None if diverged else steps_to(sweep.curve(method), target)
            missed = "diverged" if diverged else "not reached"
            reached = missed if steps is None else f"{steps:.0f}"
            faster = "" if steps is None else f"{100 * (total / steps - 1):+.1f}%"
            cells = [f"{target:.4f}", str(total), norm_of(method), reached, faster]
            rows.append([sweep.name, *cells])
    head = ["model", "target loss", "Muon steps", "Muon+ norm", "Muon+ steps", "speed-up"]
    return markdown(head, rows)


def sections(sweeps: Sequence[Sweep]) -> Iterable[tuple[str, str]]:
    """Lists title and text of each table that is not empty."""
    for sweep in sweeps:
        yield f"{sweep.name}: each method at its best rate", best_of_each(sweep)
    several = [s for s in sweeps if len({m.ortho for m in s.methods()} & set(POLYNOMIALS)) > 1]
    together = {
        "Muon+ against Muon, each at its best rate": gains(sweeps),
        "Perplexity by norm, each at its best rate": by_norm(sweeps),
        "Perplexity by polynomial, each at its best rate": by_polar(several, POLYNOMIALS),
        "Perplexity with the exact polar factor": by_polar(sweeps, ("svd",)),
        "Perplexity with matched Frobenius norm": by_size(sweeps),
        "Steps to Muon's final validation loss": to_the_same_loss(sweeps),
    }
    for title, text in together.items():
        if text.count("\n") > 1:
            yield title, text
    for sweep in sweeps:
        if sweep.plus() or MUON in sweep.methods():
            yield f"{sweep.name}: perplexity by rate, first seed", by_rate(sweep)
        if ADAMW in sweep.methods():
            yield f"{sweep.name}: AdamW by rate, first seed", adamw_rates(sweep)
