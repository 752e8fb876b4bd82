"""Several processes that train together: how they find each other and what they agree on."""

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.config import MachineConfig
from examples.errors import UserError

SHUTDOWN_SECONDS = 10  # that a process which has failed waits for others to end too
LONGEST_TEXT = 4096  # bytes; the longest path on Linux

Result = TypeVar("Result")


def join(machine: MachineConfig) -> None:
    """Connects to the other processes if that is asked for; comes before any array is made."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if not machine.distributed and given == ("", None, None):
        return
    # JAX's own service would take SIGTERM for itself; `signals` agrees on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            machine.coordinator or None,  # then JAX reads JAX_COORDINATOR_ADDRESS itself
            number("--num-processes", machine.num_processes, "JAX_NUM_PROCESSES"),
            number("--process-id", machine.process_id, "JAX_PROCESS_ID"),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, IndexError) as error:  # IndexError: an address without a port
        raise UserError(
            f"the other processes cannot be found: {error} Outside of SLURM, Open MPI, TPU pods "
            "and Kubernetes, give each process --coordinator HOST:PORT (a free port on the host "
            "of process 0), --num-processes N and --process-id 0 to N-1."
        ) from None


def number(flag: str, given: int | None, variable: str) -> int | None:
    """A flag, or else the environment variable of its name, which JAX leaves unread."""
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise UserError(f"{variable} is {text!r}: give a number, or pass {flag}.")
    return int(text)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def which() -> str:
    """Names this process in a message, if there are others."""
    return f" (process {jax.process_index()})" if jax.distributed.is_initialized() else ""


def wait_for_all() -> None:
    """Goes on when all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("examples.processes")


def abandon(error: jax.errors.JaxRuntimeError) -> NoReturn:
    """Ends this process after a computation that another one did not take part in."""
    message = (str(error).splitlines() or [""])[0]
    print(
        f"error{which()}: a computation of all processes failed, as it does when one of them "
        f"ends: {message[:300]}\nSee what the others say, and start all of them with --resume.",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # and no wait for the one that is gone


def from_first(text: str) -> str:
    """The text of process 0, in all processes."""
    if jax.process_count() == 1:
        return text
    content = text.encode()
    buffer = np.zeros(LONGEST_TEXT, np.uint8)
    buffer[: len(content)] = np.frombuffer(content, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8)
    return shared.tobytes().rstrip(b"\0").decode()


def from_all(text: str) -> list[str]:
    """The text of each process, which is short, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    buffer = np.frombuffer(text.encode().ljust(64, b"\0")[:64], np.uint8)
    shared = np.asarray(multihost_utils.process_allgather(buffer), np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in shared]


def in_turn(work: Callable[[], Result]) -> Result:
    """The result of `work`, done by process 0 and then by the others; it fails in all or in none.

    What process 0 has put on a disk that they share, the others find there.
    """
    result: list[Result] = []
    error: UserError | None = None
    for turn in (True, False):
        if is_first() == turn:
            try:
                result.append(work())
            except UserError as caught:
                error = caught
        failed = [i for i, word in enumerate(from_all("failed" if error else "")) if word]
        if error:
            raise error
        if failed:
            raise UserError(f"process {failed[0]} cannot start; its message says why.")
        if jax.process_count() == 1:
            break
    return result[0]


def check_same(plan: str) -> None:
    """Refuses processes that were given different things to do: they would wait for ever."""
    digests = from_all(hashlib.sha256(plan.encode()).hexdigest())
    different = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise UserError(
            f"processes {', '.join(map(str, different))} differ from process 0 in their flags or "
            "in their text: give all processes the same, but for --process-id."
        )


@dataclass
class Agreement:
    """The largest of the processes' numbers, so that all do the same at the same step.

    A call answers the one before it: the devices find the answer while the next step is made
    ready. Alone, a process has its answer at once.
    """

    mesh: Mesh

    def __post_init__(self):
        self.largest = jax.jit(jnp.max, out_shardings=NamedSharding(self.mesh, P()))
        self.before: jax.Array | int = 0

    def __call__(self, number: int) -> int:
        """Hands in this process's number; all processes call equally often."""
        if jax.process_count() == 1:
            return number
        everywhere = NamedSharding(self.mesh, P(self.mesh.axis_names))
        numbers = jax.make_array_from_callback(
            (self.mesh.size,), everywhere, lambda index: np.full(1, number, np.int32)
        )
        answer, self.before = self.before, self.largest(numbers)
        return int(answer)
