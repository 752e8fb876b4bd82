"""Batches that are on the devices before they are needed."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
