"""How fast a run is: step time, tokens, model operations, memory.

The names are Levanter's (`throughput/...`, `grad/norm/total`, `optim/...`); those of one device,
which Levanter does not write, are MaxText's (`perf/per_device_...`). `memory/peak_bytes_in_use` is
the statistic of JAX of that name, largest of the devices of process 0.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.trainer.settings.machines import MachineConfig
from examples.trainer.settings.model import training_flops_per_token
from examples.trainer.system import chips
from examples.trainer.training.program import TrainingSetup

DURATION = "throughput/duration"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
BEFORE = "tokens_per_second"  # its name in the files of runs before these names
LOADING = "throughput/loading_time"
MFU = "throughput/mfu"
GRADIENT_NORM = "grad/norm/total"


class Work(NamedTuple):
    """What a step of a run does, and what its devices could do."""

    tokens: int
    """Tokens of a step, on all devices."""
    flops_per_token: float
    """Operations that the model needs for a token."""
    devices: int
    peak: float | None
    """Operations a second of one device; None where it is not known, as on a CPU."""

    def measured(self, seconds: float) -> dict[str, float]:
        rate = self.tokens / seconds
        flops = rate * self.flops_per_token
        figures = {
            DURATION: rounded(seconds),
            TOKENS_PER_SECOND: rounded(rate),
            "perf/per_device_tokens_per_sec": rounded(rate / self.devices),
            "throughput/gflops_per_second": rounded(flops / 1e9),
            "perf/per_device_tflops_per_sec": rounded(flops / 1e12 / self.devices),
        }
        if self.peak is not None:
            figures[MFU] = rounded(100 * flops / self.devices / self.peak)  # percent, as Levanter
        return figures


def work_of(setup: TrainingSetup, machine: MachineConfig) -> Work:
    config, given = setup.config, machine.peak_tflops
    vocabulary = setup.dataset.tokenizer.get_vocab_size()
    kind = setup.mesh.devices.flat[0].device_kind
    return Work(
        tokens=config.batch_size * config.model.context,
        flops_per_token=training_flops_per_token(config.model, vocabulary),
        devices=setup.mesh.size,
        peak=chips.peak(kind) if given is None else 1e12 * given,
    )


def speed_of(record: dict[str, Any]) -> float | None:
    """The tokens per second of a record, also of one from before these names; None without."""
    return record.get(TOKENS_PER_SECOND, record.get(BEFORE))


def peak_memory() -> dict[str, int]:
    """The most bytes that programs have used on a device; empty where devices do not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return {"memory/peak_bytes_in_use": max(used)} if used else {}


def rounded(x: Any, digits: int = 6) -> float:
    """A number with as many digits as mean something."""
    x = float(np.asarray(x))
    return float(f"{x:.{digits}g}") if math.isfinite(x) else x
