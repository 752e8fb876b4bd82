"""What stands in the cells of tables of sweeps."""

import math
import statistics
from collections.abc import Iterable, Sequence

from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import Sweep


def perplexity(losses: Iterable[float]) -> float:
    """Mean perplexity over seeds."""
    return statistics.fmean(math.exp(min(loss, 700.0)) for loss in losses)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean, and standard deviation if there is more than one value."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def ppl(losses: Iterable[float]) -> str:
    """Mean perplexity of some runs, as the content of a cell."""
    losses = list(losses)
    return f"{perplexity(losses):.2f}" if all(map(math.isfinite, losses)) else "diverged"


def difference(sweep: Sweep, method: Method, other: Method) -> str:
    """The difference between the losses of two methods, by seed, as the content of a cell."""
    if other not in sweep.methods() or method == other:
        return ""
    return spread(sweep.gaps(method, other), 4)


def rate_of(sweep: Sweep, method: Method) -> str:
    """The best rate, with a star if it is the lowest or highest that was tried."""
    return f"{sweep.best_rate(method):g}{'*' if sweep.at_edge(method) else ''}"
