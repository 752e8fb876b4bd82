"""Which GPUs a task of SLURM should take.

JAX takes the GPU whose number is SLURM_LOCALID (jax 0.10.2, jax/_src/clusters/cluster.py). That is
right only if there is one task for each GPU and every task sees all of them: with
`--gpus-per-task=1` each task sees one, number 0, and one task on a host would get one GPU of eight.
"""

import re
from collections.abc import Mapping

from examples.trainer.system.errors import UserError


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """The numbers of this task's GPUs, among those that it sees; None leaves the choice to JAX.

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
