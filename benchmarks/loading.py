"""Tokens per second of training with batches that are read, and with one that is there already."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import timing
from examples.trainer.data.loader import Loader
from examples.trainer.data.placement import place_batch
from examples.trainer.data.prefetch import prefetch
from examples.trainer.training import sharding

STEPS = 20  # that are timed together
TEXT = 20_000_000  # tokens of the text, 40 MB on disk


def measure(
    step: Callable[[Any], jax.Array],
    rows: int,
    context: int,
    vocabulary: int,
    mesh: Mesh,
    rounds: int,
) -> dict[str, Any]:
    """Measures tokens per second of both ways in turn, and the ratio of the rounds' median.

    The text is random and lies in a file, as tokens of a run do. Nothing else is done between
    steps, so that a step waits for nothing but its batch.
    """
    place = sharding.of_batch(mesh)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, vocabulary, TEXT, np.uint16).tofile(path)
        loader = Loader(np.memmap(path, np.uint16, "r"), context, rows, seed=0)
        there = place_batch(loader, 0, place)

        def same() -> jax.Array:
            return [step(there) for _ in range(STEPS)][-1]

        def read() -> jax.Array:
            return [step(next(ahead)) for _ in range(STEPS)][-1]

        # One untimed round, and the batches that are read ahead and not used.
        needed = range((rounds + 2) * STEPS)
        with prefetch(lambda i: place_batch(loader, i, place), needed) as ahead:
            programs = {"same batch": same, "read ahead": read}
            seconds = timing.interleaved(programs, rounds)
    tokens = STEPS * rows * context
    return {
        "tokens_per_second": {name: tokens / float(np.median(s)) for name, s in seconds.items()},
        "loading_ratio": float(np.median(seconds["read ahead"] / seconds["same batch"])),
    }
