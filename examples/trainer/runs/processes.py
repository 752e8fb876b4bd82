"""Several processes that train together: how they connect, agree, and are asked to stop."""

import hashlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.trainer.settings.run import MachineConfig
from examples.trainer.system.errors import UserError

INIT_SECONDS = 600  # to wait for all processes at the start; large clusters start slowly
SHUTDOWN_SECONDS = 10  # how long JAX waits at the end of a process before it ends all others
LONGEST_TEXT = 4096  # bytes; the longest path on Linux

Result = TypeVar("Result")


def join(machine: MachineConfig) -> None:
    """Connects to the other processes if the flags say so; must run before any array is made."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if not machine.distributed and given == ("", None, None):
        return
    try:
        jax.distributed.initialize(
            machine.coordinator or None,
            machine.num_processes,
            machine.process_id,
            initialization_timeout=INIT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, IndexError) as error:  # IndexError: an address without a port
        raise UserError(
            f"the other processes cannot be found: {error} Outside of SLURM, Open MPI, TPU pods "
            "and Kubernetes, give each process --coordinator HOST:PORT (a free port on the host "
            "of process 0), --num-processes N and --process-id 0 to N-1."
        ) from None
    # Gloo, which moves data between CPUs, waits 30 s for the others when it first connects them,
    # and for ever later, as when process 0 reads the text.
    wait_for_all()


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def wait_for_all() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("examples.processes")


def from_first(text: str) -> str:
    """The text of process 0, in all processes."""
    buffer = np.frombuffer(text.encode().ljust(LONGEST_TEXT, b"\0"), np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8)
    return shared.tobytes().rstrip(b"\0").decode()


def first_then_others(work: Callable[[], Result]) -> Result:
    """Runs `work` in process 0, and then in the others, which find what it has written."""
    if not is_first():
        wait_for_all()
    result = work()
    if is_first():
        wait_for_all()
    return result


def check_same(plan: str) -> None:
    """Refuses processes with different plans, which would wait for each other for ever."""
    own = hashlib.sha256(plan.encode()).hexdigest()
    if any(multihost_utils.process_allgather(np.asarray(own != from_first(own))).flat):
        raise UserError(
            "the processes differ in their flags or in their text: give all of them the same, but "
            "for --process-id."
        )


class StopRequests:
    """Turns Ctrl-C and SIGTERM into a request to stop; a second Ctrl-C interrupts.

    With several processes JAX's preemption service handles SIGTERM, and finds a step after which
    all of them stop.
    """

    def __init__(self):
        self.signal = 0
        """The signal that the run stops for; 0 as long as it continues."""

    def __enter__(self) -> "StopRequests":
        numbers = [signal.SIGINT] + [signal.SIGTERM] * (jax.process_count() == 1)
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if jax.process_count() == 1:
            self.signal = self.signal or number
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self, step: int) -> bool:
        """Whether to stop after `step` steps; called before each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
