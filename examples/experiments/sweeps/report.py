"""A table of a sweep: each method at its best rate."""

import math
import statistics
from collections.abc import Iterable

from examples.experiments.sweeps.results import MUON, Sweep
from examples.trainer.system import tables


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
    return tables.markdown(head, rows)
