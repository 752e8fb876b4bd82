"""What the machine is, and how fast it multiplies matrices of a given size."""

import collections
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

Name = TypeVar("Name", bound=Hashable)

_CHAINED = 8  # products in one turn of a loop, so that its own copies do not count
_TURNS = 4


def describe() -> dict[str, str]:
    """Device, processor and versions, for the record beside every figure."""
    packages = ("jax", "jaxlib", "optax", "optax_muonplus")
    return {
        "device": jax.devices()[0].device_kind,
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else ())
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def product_chain(
    n: int, m: int, dtype: Any, batch: int = 1
) -> tuple[Callable[[], jax.Array], dict[tuple[int, int, int], int]]:
    """A program of nothing but products of (n, n) with (n, m), and what they are.

    For m > n they are the two of a Newton-Schulz step, in turn: ``R = X X^T`` and ``R X``. Rows of
    X are orthonormal, so that numbers keep their size.

    Returns:
      The program, and how often it does each product (rows, inner, columns).
    """
    shape = (m, n) if batch == 1 else (batch, m, n)
    x = jnp.linalg.qr(jax.random.normal(jax.random.key(0), shape))[0].mT.astype(dtype)

    def turn(_: Any, y: jax.Array) -> jax.Array:
        for _ in range(_CHAINED):
            y = y @ x if m == n else (y @ x.mT) @ x
        return y

    program = jax.jit(lambda x: jax.lax.fori_loop(0, _TURNS, turn, x))
    times = batch * _CHAINED * _TURNS
    done = {(n, n, n): times} if m == n else {(n, m, n): times, (n, n, m): times}
    return lambda: program(x), done


def interleaved(
    programs: Mapping[Name, Callable[[], Any]], rounds: int, console: Console
) -> dict[Name, np.ndarray]:
    """Seconds of each program in each round, one after the other in every round."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds = collections.defaultdict(list)
    for _ in track(range(rounds), "rounds", console=console):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(values) for name, values in seconds.items()}
