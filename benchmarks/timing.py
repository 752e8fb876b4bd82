"""Times several programs in one process, in turn."""

import collections
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

Name = TypeVar("Name", bound=Hashable)


def interleaved(
    programs: Mapping[Name, Callable[[], Any]], rounds: int, console: Console
) -> dict[Name, np.ndarray]:
    """Seconds of each program in each round. A round runs every program once, one after the other.

    An untimed round comes first.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    seconds = collections.defaultdict(list)
    for _ in track(range(rounds), "rounds", console=console):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(values) for name, values in seconds.items()}
