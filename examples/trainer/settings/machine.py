"""The settings of a machine: where a run is computed, kept and shown."""

import dataclasses
import re
from typing import Literal

from examples.trainer.settings import validation
from examples.trainer.settings.validation import (
    STRICT,
    Count,
    CountOrZero,
    FiniteOrZero,
    FinitePositive,
)
from examples.trainer.system.errors import UserError

TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """Where a run is computed and shown. This may change with each --resume."""

    __pydantic_config__ = STRICT

    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4,tensor=1; empty: all on fsdp. With data and
    more than 8 devices XLA gets a flag that sums gradients between hosts beside other work."""
    distributed: bool = False
    """This is one of several processes, which find each other through SLURM, Open MPI or
    JAX_COORDINATOR_ADDRESS."""
    coordinator: str = ""
    """HOST:PORT of process 0, if they do not find each other; implies --distributed."""
    num_processes: int | None = None
    """Number of processes, if they do not find each other."""
    process_id: int | None = None
    """Number of this process, from 0, if they do not find each other."""
    init_timeout: Count = 300
    """Seconds to wait for all processes at the start; large clusters start slowly."""
    peak_tflops: FinitePositive | None = None
    """What a device could do, in TFLOP/s of 16-bit products, for MFU; None: by the kind of device,
    where it is known."""
    tracker: tuple[TrackerName, ...] = ()
    """Dashboards that get the figures of metrics.jsonl too."""
    tokenize: bool = False
    """Stream what is missing of FineWeb or a dataset of the hub: with several processes, the first
    one while all wait; and in a resume, whose folder may name any dataset."""
    checkpoint_minutes: FiniteOrZero = 15.0
    """Minutes between checkpoints, beside those by steps; 0 for none by time."""
    eval_minutes: FiniteOrZero = 0.0
    """Minutes between evaluations, beside those by steps; 0 for none by time."""
    keep_every: CountOrZero = 0
    """Save multiples of so many steps and keep them for good; 0: only the two newest are kept."""
    watchdog_minutes: FiniteOrZero = 5.0
    """End the run, after the stacks of all threads, if a step, an evaluation or a save takes longer
    than this and than ten times its median; 0 for never."""
    profile: str = ""
    """FROM:TO, the steps to record with the profiler of JAX."""


def check(machine: MachineConfig, steps: int) -> None:
    validation.check(machine)
    profiled = profiled_steps(machine)
    if profiled and profiled[-1] > steps:
        raise UserError(
            f"--profile {machine.profile} goes beyond the last step, {steps}: give earlier steps."
        )


def profiled_steps(machine: MachineConfig) -> range | None:
    """The steps that --profile names, both ends included; None without the flag."""
    if not machine.profile:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", machine.profile)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(
            f"--profile {machine.profile}: give the first and the last step to record, as 10:12."
        )
    return range(int(found[1]), int(found[2]) + 1)
