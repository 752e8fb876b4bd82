"""The settings of a machine, and machines on which the paper's recipes fit, by name.

Each recipe has the smallest number of NVIDIA H100 on which its training step, its evaluation and
its initial state were compiled and fit, with the paper's batch and context (`--compile-for`;
examples/README.md has the figures). TPU v5e slices are from the state that a run keeps; those in
that table were compiled too. A recipe fits larger machines of the kind as well: the same rows a
device at a time, and less of the state on each. Other GPUs and TPUs are taken like an H100 or a
v5e, as each has at least its memory by the data sheet; they were not compiled for.
"""

import dataclasses
import math
import re
from typing import Literal

from examples.trainer.settings import validation
from examples.trainer.settings.presets import BATCH, ROWS
from examples.trainer.settings.run import RunConfig
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
    profile: str = ""
    """FROM:TO, the steps to record with the profiler of JAX."""


def check_machine(machine: MachineConfig, steps: int) -> None:
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


HOST = 8  # GPUs that NVLink connects
LIKE = {"h100": ("h100", "a100", "h200", "b200"), "v5e": ("v5e", "v5p", "v6e")}
"""Kinds of devices with at least the memory of one; an A100 is one of 80 GB."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a recipe fits a kind of machine."""

    smallest: str
    """The smallest machine, such as ``"h100-8"`` or ``"v5e-4x4"``."""
    rows: int
    """Rows that a device works on at a time; `--accumulate` follows from it."""
    recomputes: bool = False
    """Whether a device has no room for all activations of a row. Where it has, nothing is computed
    again, and blocks are compiled one by one: a loop over layers copies what it keeps, twice."""

    @property
    def kind(self) -> str:
        return self.smallest.partition("-")[0]


# 4,000 to 32,000 tokens a device at a time, so that all activations fit where they can. Fewer rows
# make products less efficient and gather parameters more often.
FITS: dict[str, tuple[Fit, ...]] = {
    "gpt-small": (Fit("h100-1", 16), Fit("v5e-1", 4)),
    "gpt-base": (Fit("h100-1", 8), Fit("v5e-1", 1)),
    "gpt-large": (Fit("h100-1", 2), Fit("v5e-2x2", 1, recomputes=True)),
    "gpt-huge": (Fit("h100-8", 8), Fit("v5e-4x4", 4, recomputes=True)),
    "gpt-base-72b": (Fit("h100-1", 8), Fit("v5e-1", 1)),
    "llama-60m": (Fit("h100-1", 32), Fit("v5e-1", 8)),
    "llama-130m": (Fit("h100-1", 32), Fit("v5e-1", 8)),
    "llama-350m": (Fit("h100-1", 8), Fit("v5e-1", 2)),
    "llama-1b": (Fit("h100-1", 4), Fit("v5e-2x2", 2, recomputes=True)),
    "llama-7b": (Fit("h100-8", 8), Fit("v5e-4x4", 4, recomputes=True)),
    "llama-350m-72b": (Fit("h100-1", 8), Fit("v5e-1", 2)),
}
"""Name of a recipe to its fits, the H100 first; its run with Muon has the same."""


def devices_of_machine(machine: str) -> int:
    """The number of devices of ``"h100-8"`` or ``"v5e-4x4"``."""
    gpus, tpus = ("|".join(kinds) for kinds in LIKE.values())
    found = re.fullmatch(rf"(?:{gpus})-(\d+)|(?:{tpus})-(\d+(?:x\d+)*)", machine)
    n = math.prod(int(size) for size in (found[1] or found[2]).split("x")) if found else 0
    if n == 0 or n & (n - 1):
        raise UserError(
            f"--machine {machine}: give h100-1, h100-8, h100-64, as many a100, h200 or b200, or a"
            " TPU slice such as v5e-4x4, v6e-4x4 or v5p-2x2x1, with a power of two of devices."
        )
    return n


def fit(recipe: str, machine: str) -> Fit:
    """How a recipe fits a machine; raises `UserError` if it is not known to."""
    fits = FITS.get(recipe.removesuffix("-muon"))
    if fits is None:
        raise UserError(
            f"--machine is for the recipes of the paper, {', '.join(ROWS)}; {recipe} fits anywhere."
        )
    n = devices_of_machine(machine)
    for one in fits:
        if machine.partition("-")[0] in LIKE[one.kind] and n >= devices_of_machine(one.smallest):
            return one
    smallest = " or ".join(one.smallest for one in fits)
    raise UserError(
        f"{recipe} is not known to fit --machine {machine}: the smallest is {smallest}."
        " --compile-for says what other machines and flags would do."
    )


def mesh_of_machine(machine: str) -> str:
    """The `--mesh` of a machine: GPUs gather parameters within a host, where links are fast."""
    n = devices_of_machine(machine)
    if machine.partition("-")[0] in LIKE["h100"] and n > HOST:
        return f"data={n // HOST},fsdp={HOST}"
    return f"fsdp={n}"


def on_machine(recipe: str, machine: str, config: RunConfig) -> RunConfig:
    """The recipe in pieces that fit, and where they do with all activations."""
    fitting = fit(recipe, machine)
    rows = min(fitting.rows, max(1, BATCH // devices_of_machine(machine)))
    pieces = BATCH // (rows * devices_of_machine(machine))
    if pieces == 0:
        raise UserError(
            f"--machine {machine} has more devices than a step of {recipe} has rows, {BATCH}: give"
            f" a machine of at most {BATCH}."
        )
    if not fitting.recomputes:
        model = dataclasses.replace(config.model, remat="none", scan=False)
        config = dataclasses.replace(config, model=model)
    return dataclasses.replace(config, accumulate=pieces)
