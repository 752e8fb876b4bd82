"""Times several programs in one process, in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def interleaved(
    programs: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1
) -> dict[str, np.ndarray]:
    """Measures seconds of a call of each program in each round, which runs them one by one.

    An untimed round comes first.

    Args:
      programs: functions of no arguments, which return arrays, or what has a
        ``block_until_ready`` of its own.
      rounds: how often each program is timed.
      calls: of a program in a round. They are all enqueued before the last is waited for, so that
        an accelerator does not wait for the host between them.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            begin = time.perf_counter()
            for _ in range(calls):
                result = program()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - begin) / calls)
    return {name: np.array(values) for name, values in seconds.items()}


def median_and_quartiles(seconds: np.ndarray) -> dict[str, Any]:
    """Returns the entries of a record for the times of one program."""
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return {"median_s": float(median), "quartiles_s": [float(low), float(high)]}
