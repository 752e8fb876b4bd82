"""Several processes that train together: how they connect, exchange text and agree."""

import functools
import hashlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system import exit_status
from examples.trainer.system.errors import UserError

INIT_SECONDS = 600  # to wait for all processes at the start; large clusters start slowly
SHUTDOWN_SECONDS = 10  # how long a failed process waits for the others to end
JOINT = re.compile(r"[A-Z_]+: .*(Gloo|NCCL|coordination|barrier|by peer)", re.I | re.S)
"""The text of an error, after its status, of those that wait for each other."""
LONGEST_TEXT = 4096  # bytes; the longest path on Linux

Result = TypeVar("Result")


def join(machine: MachineConfig) -> None:
    """Connects to the other processes if the flags say so; must run before any array is made."""
    given = (machine.coordinator, machine.num_processes, machine.process_id)
    if not machine.distributed and given == ("", None, None):
        return
    # JAX's own service would handle SIGTERM; here `signals` does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            machine.coordinator or None,  # JAX itself reads JAX_COORDINATOR_ADDRESS
            flag_or_variable("--num-processes", machine.num_processes, "JAX_NUM_PROCESSES"),
            flag_or_variable("--process-id", machine.process_id, "JAX_PROCESS_ID"),
            local_devices(os.environ),
            initialization_timeout=INIT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, IndexError) as error:  # IndexError: an address without a port
        raise UserError(
            f"the other processes cannot be found: {error} Outside of SLURM, Open MPI, TPU pods "
            "and Kubernetes, give each process --coordinator HOST:PORT (a free port on the host "
            "of process 0), --num-processes N and --process-id 0 to N-1."
        ) from None
    from_all("")  # for the same reason as `connect`: later all wait while process 0 reads the text


def flag_or_variable(flag: str, given: int | None, variable: str) -> int | None:
    """The value of a flag, or else of its environment variable, which JAX does not read."""
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


def process_label() -> str:
    """Names this process in a message if there are several."""
    return f" (process {jax.process_index()})" if jax.distributed.is_initialized() else ""


def wait_for_all() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("examples.processes")


def connect(mesh: Mesh) -> None:
    """Lets the devices of each group along axes of a mesh find each other, where these are CPUs.

    In Gloo, which moves data between CPUs, the first process that needs a group fails if the last
    one comes more than 30 s later, and the last one then waits for ever for the first to connect
    (jaxlib 0.10.2). Processes compile a step for different times. Once connected they wait for each
    other. All processes call this at the same time.
    """
    if jax.process_count() > 1 and mesh.devices.flat[0].platform == "cpu":
        for total, ones in sums(mesh):
            jax.block_until_ready(total(ones))


def sums(mesh: Mesh) -> Iterator[tuple[Any, jax.Array]]:
    """Sums over each choice of shared axes, one collective each, and an array with one on each."""
    axes = [name for name, size in mesh.shape.items() if size > 1]
    one = np.ones([1] * len(axes), np.float32)
    spread, shape = NamedSharding(mesh, P(*axes)), tuple(mesh.shape[name] for name in axes)
    ones = jax.make_array_from_callback(shape, spread, lambda index: one)
    for count in range(1, len(axes) + 1):
        for summed in itertools.combinations(axes, count):
            left = P(*(None if name in summed else name for name in axes))
            total = functools.partial(jax.lax.psum, axis_name=summed)
            mapped = jax.shard_map(total, mesh=mesh, in_specs=P(*axes), out_specs=left)
            yield jax.jit(mapped), ones


def is_joint(error: Exception) -> bool:
    """Whether a joint computation failed, whose errors are not all of JAX's own class."""
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(JOINT.match(str(error)))


def exit_without_others(error: Exception) -> NoReturn:
    """Ends this process after an error that the others do not know of, without waiting for them.

    After a joint computation failed, usually because another process ended, it says so.
    """
    if not is_joint(error):
        traceback.print_exception(error)
        exit_status.leave_at_once(1)
    message = (str(error).splitlines() or [""])[0]
    print(
        f"error{process_label()}: a computation of all processes failed, as it does when one of "
        f"them ends: {message[:300]}\nRead the messages of the others, and start all of them with "
        "--resume.",
        file=sys.stderr,
    )
    exit_status.leave_at_once(1)  # does not wait for the process that has ended


def from_all(text: str, size: int = 64) -> list[str]:
    """The texts of all processes in their order; each has at most `size` bytes."""
    if jax.process_count() == 1:
        return [text]
    buffer = np.frombuffer(text.encode().ljust(size, b"\0")[:size], np.uint8)
    shared = np.asarray(multihost_utils.process_allgather(buffer), np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in shared]


def from_first(text: str) -> str:
    return from_all(text, LONGEST_TEXT)[0]


def first_then_others(work: Callable[[], Result]) -> Result:
    """Runs `work` in process 0 and then in the others; it fails in all of them or in none.

    The others find what process 0 has written on a shared disk.
    """
    if is_first():
        result = together(work)
        together(lambda: None)
        return result
    together(lambda: None)
    return together(work)


def together(work: Callable[[], Result]) -> Result:
    """Runs `work` in all processes at the same time; it fails in all of them or in none."""
    result, error = None, None
    try:
        result = work()
    except (UserError, OSError) as caught:
        error = caught
    failed = [i for i, text in enumerate(from_all("failed" if error else "")) if text]
    if error:
        raise error
    if failed:
        raise UserError(f"process {failed[0]} cannot go on; its message says why.")
    return cast("Result", result)


def check_same(plan: str) -> None:
    """Refuses processes with different plans, which would wait for each other forever."""
    digests = from_all(hashlib.sha256(plan.encode()).hexdigest())
    different = [i for i, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise UserError(
            f"processes {', '.join(map(str, different))} differ from process 0 in their flags or "
            "in their text: give all processes the same, but for --process-id."
        )


Agree = Callable[[Sequence[int], bool], tuple[int, ...]]
"""Numbers of this process, and whether to wait, to the numbers that all processes follow."""


def agreement(mesh: Mesh) -> Agree:
    """A function to the maxima of the processes' numbers, so that all act at the same step.

    It returns the maxima of the numbers of its previous call: the devices compute them while the
    next step is prepared. If it is told to wait, it waits for the devices, and returns those of
    this call too. A single process gets its own numbers at once. All processes must call it
    equally often, and wait at the same calls.
    """
    if jax.process_count() == 1:
        return lambda numbers, wait: tuple(numbers)
    largest = jax.jit(lambda x: x.max(axis=0), out_shardings=NamedSharding(mesh, P()))
    one_each = NamedSharding(mesh, P(mesh.axis_names))
    unread: list[jax.Array] = []

    def agree(numbers: Sequence[int], wait: bool) -> tuple[int, ...]:
        row = np.asarray([numbers], np.int32)
        rows = jax.make_array_from_callback((mesh.size, len(numbers)), one_each, lambda index: row)
        unread.append(largest(rows))
        read = unread[:] if wait else unread[:-1]
        del unread[: len(read)]
        found = [np.zeros(len(numbers), np.int32), *map(np.asarray, read)]
        return tuple(np.max(found, axis=0).tolist())

    return agree


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The numbers of this task's GPUs, among those that it sees; None leaves the choice to JAX.

    JAX takes the GPU whose number is SLURM_LOCALID (jax 0.10.2, jax/_src/clusters/cluster.py). That
    is right only if there is one task for each GPU and every task sees all of them: with
    `--gpus-per-task=1` each task sees one, number 0, and one task on a host would get one of eight.

    With v GPUs in CUDA_VISIBLE_DEVICES and t tasks on the host, a task takes all v if they are its
    own: v < t, or v is `--gpus-per-task`, or the job has more than v on the host. Otherwise all
    tasks see the same GPUs, and each takes v / t of them. Raises `UserError` if t does not divide
    v. JAX_LOCAL_DEVICE_IDS decides where it is set.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    outside = not {"SLURM_JOB_ID", "SLURM_LOCALID"} <= environment.keys()
    if outside or "JAX_LOCAL_DEVICE_IDS" in environment or visible in ("", "NoDevFiles"):
        return None
    seen, tasks = len(visible.split(",")), tasks_on_host(environment)
    on_host, per_task = (
        int(given) if (given := environment.get(name, "")).isdecimal() else seen
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK")
    )
    own = "SLURM_GPUS_PER_TASK" in environment and seen == per_task
    if own or seen < max(tasks, on_host):
        return list(range(seen))
    if seen % tasks:
        raise UserError(
            f"{tasks} tasks of SLURM share the {seen} GPUs of this host: give --ntasks-per-node "
            "that divides them, 1 or the number of GPUs, or set JAX_LOCAL_DEVICE_IDS for each task."
        )
    share, place = seen // tasks, int(environment["SLURM_LOCALID"])
    return list(range(place * share, (place + 1) * share))


def tasks_on_host(environment: Mapping[str, str]) -> int:
    """The tasks of this step on this host, from a list such as `8(x2),4`: 8, 8 and 4."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE")
    counts = []
    for count, hosts in re.findall(r"(\d+)(?:\(x(\d+)\))?", text or "1"):
        counts += [int(count)] * int(hosts or 1)
    place = environment.get("SLURM_NODEID", "0")
    return counts[min(int(place), len(counts) - 1)]
