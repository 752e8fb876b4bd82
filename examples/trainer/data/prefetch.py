"""Batches that are on the devices before they are needed."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Batch = TypeVar("Batch")
AHEAD = 2  # batches that wait on the devices; a second one covers a read that takes long


class Prefetch(Generic[Batch]):
    """`next` is `read(step)` for each step of a range, read ahead in a thread.

    A batch is a function of its step, so that which thread reads it changes nothing. Leaving the
    context ends the thread.
    """

    def __init__(self, read: Callable[[int], Batch], steps: range, ahead: int = AHEAD):
        self.read = read
        self.steps = steps
        self.left = len(steps)
        self.ready: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        self.stopped = threading.Event()
        # A daemon, so that a disk that does not answer cannot keep the process alive.
        self.thread = threading.Thread(target=self._fill, name="batches", daemon=True)

    def __enter__(self) -> "Prefetch[Batch]":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stopped.set()
        if kind is KeyboardInterrupt:  # who presses Ctrl-C does not wait for a disk
            return
        while self.thread.is_alive():
            try:
                self.ready.get_nowait()  # makes room for a thread that waits for it
            except queue.Empty:
                self.thread.join(0.05)

    def __next__(self) -> Batch:
        """The batch of the next step; raises what reading it raised."""
        if not self.left:
            raise StopIteration
        batch = self.ready.get()
        if isinstance(batch, BaseException):
            raise batch
        self.left -= 1
        return batch

    def _fill(self) -> None:
        try:
            for step in self.steps:
                if self.stopped.is_set():
                    return
                self.ready.put(self.read(step))
        except BaseException as error:  # for the thread that waits for the batch
            self.ready.put(error)
