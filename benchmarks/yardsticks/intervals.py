"""Means over seeds with their intervals."""

import importlib.metadata
from collections.abc import Sequence

from examples.experiments.sweeps.contrasts import estimate


def written(values: Sequence[float], digits: int) -> str:
    """Writes the mean, and the half width of its interval of 95% by Student's distribution."""
    found = estimate(values)
    mean = f"{found.mean:.{digits}f}"
    return f"{mean} ± {found.half_width:.{digits}f}" if len(values) > 1 else mean


def versions(*packages: str) -> dict[str, dict[str, str]]:
    """Versions of packages, as an entry of a record."""
    return {"packages": {name: importlib.metadata.version(name) for name in packages}}
