"""The settings of the machine that a run is computed on."""

import dataclasses
from typing import Literal

from examples.trainer.settings.validation import STRICT

TrackerName = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """Where a run is computed and shown. This may change with each --resume."""

    __pydantic_config__ = STRICT

    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4,tensor=1; empty: all on fsdp."""
    distributed: bool = False
    """This is one of several processes, which find each other through SLURM, Open MPI or a
    TPU pod."""
    coordinator: str = ""
    """HOST:PORT of process 0, if they do not find each other; implies --distributed."""
    num_processes: int | None = None
    """Number of processes, if they do not find each other."""
    process_id: int | None = None
    """Number of this process, from 0, if they do not find each other."""
    tracker: tuple[TrackerName, ...] = ()
    """Dashboards that get the figures of metrics.jsonl too."""
