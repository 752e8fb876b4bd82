"""Batches on devices, before they are needed; each process reads only its own devices' rows."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from examples.trainer.data.loader import Loader

Index = tuple[slice, ...] | None


def place_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts rows that every process has on the devices, with the given sharding."""
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def place_batch(loader: Loader, step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets of a step, with the given sharding; reads only rows of this process."""
    shape = (loader.batch_size, loader.context)

    def rows(index: Index) -> range:
        return range(*(index[0] if index else slice(None)).indices(loader.batch_size))

    # Devices with the same rows, such as those along `tensor`, share one read.
    needed = set(map(rows, sharding.addressable_devices_indices_map(shape).values()))
    read = {part: loader.batch(step, part) for part in needed}

    def put(which: int) -> jax.Array:
        def part(index: Index) -> np.ndarray:
            return read[rows(index)][which]

        return jax.make_array_from_callback(shape, sharding, part)

    return put(0), put(1)


Batch = TypeVar("Batch")
AHEAD = 2  # batches that wait on the devices; a second one covers a read that takes long


@contextlib.contextmanager
def prefetch(read: Callable[[int], Batch], steps: range) -> Generator[Iterator[Batch]]:
    """Gives `read(step)` for each step, read ahead in a thread.

    A batch is a function of its step, so that which thread reads it changes nothing. What reading
    raises is raised where the batch is needed.
    """
    pool = ThreadPoolExecutor(1, "batches")

    def batches() -> Iterator[Batch]:
        reading = deque(pool.submit(read, step) for step in steps[:AHEAD])
        for step in range(len(steps)):
            reading.extend(pool.submit(read, later) for later in steps[step + AHEAD :][:1])
            yield reading.popleft().result()

    try:
        yield batches()
    finally:  # without waiting for a disk, since someone may have pressed Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
