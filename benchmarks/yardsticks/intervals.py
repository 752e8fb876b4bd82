"""Means over seeds with their intervals."""

import importlib.metadata
import math
import statistics
from collections.abc import Sequence

from scipy import stats


def written(values: Sequence[float], digits: int) -> str:
    """Writes the mean, and the half width of its interval of 95% by Student's distribution."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {half_width(values):.{digits}f}" if len(values) > 1 else mean


def half_width(values: Sequence[float]) -> float:
    """Half the interval of 95% of a mean, by Student's distribution."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)


def versions(*packages: str) -> dict[str, dict[str, str]]:
    """Versions of packages, as an entry of a record."""
    return {"packages": {name: importlib.metadata.version(name) for name in packages}}
