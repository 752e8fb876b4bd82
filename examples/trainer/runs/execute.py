"""Executes a run in its folder: from its last checkpoint to its end or a request to stop."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import processes, speed
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.loop import Loop
from examples.trainer.runs.metrics import MATRICES, METRICS, Metrics
from examples.trainer.runs.profiling import Profile
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.signals import StopRequests
from examples.trainer.settings.command_line import DEFAULT_MACHINE
from examples.trainer.settings.run import MachineConfig, profiled_steps
from examples.trainer.system.errors import UserError
from examples.trainer.training.setup import TrainingSetup
from examples.trainer.training.step import TrainState


@dataclass(frozen=True)
class Outcome:
    """The state of a run when `execute` returns."""

    state: TrainState
    step: int
    stopped_by: int
    """The signal that stopped the run; 0 if it reached its end."""


def execute(
    setup: TrainingSetup,
    folder: Path,
    display: Observer,
    begin: Callable[[TrainState, int], None],
    machine: MachineConfig = DEFAULT_MACHINE,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Trains and writes measurements and checkpoints; calls `begin` before the first step."""
    metadata = functools.partial(run_folder.step_metadata, setup.config, setup.dataset.key)
    with Checkpoints(folder / "checkpoints", metadata, say) as checkpoints:
        start = checkpoints.latest_step()
        profiled = profiled_steps(machine)
        if profiled and profiled[0] <= start:
            raise UserError(
                f"--profile {machine.profile}: the run goes on with step {start + 1}; give steps"
                " from there on."
            )
        state = checkpoints.restore(start, setup.program.abstract) if start else setup.init()
        begin(state, start)
        display.begin(start)
        with (
            Metrics(folder / METRICS, start, say) as metrics,
            open_matrices(folder, setup, start, say) as matrices,
        ):
            loop = Loop(
                setup=setup,
                save=checkpoints.save,
                wait_until_saved=checkpoints.wait_until_saved,
                stop=StopRequests(processes.Agreement(setup.mesh)),
                metrics=metrics,
                matrices=matrices,
                display=display,
                work=work_of(setup, machine),
                profile=Profile(profiled, folder, say),
            )
            state, step = loop.run(state, start)
    return Outcome(state, step, loop.stop.agreed if step < setup.config.steps else 0)


def work_of(setup: TrainingSetup, machine: MachineConfig) -> speed.Work:
    """What a step does, and what the devices could do."""
    return speed.work_of(
        setup.config,
        setup.dataset.tokenizer.get_vocab_size(),
        setup.mesh.size,
        setup.mesh.devices.flat[0].device_kind,
        machine.peak_tflops,
    )


def open_matrices(
    folder: Path, setup: TrainingSetup, start: int, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[Metrics | None]:
    """The file for records of the matrices; None if none are made."""
    if not setup.config.optimizer.record_every:
        return contextlib.nullcontext()
    return Metrics(folder / MATRICES, start, say)
