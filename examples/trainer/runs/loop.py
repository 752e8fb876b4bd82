"""Trains a run in its folder: steps, measurements, evaluations, checkpoints, requests to stop."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import optax_muonplus as omp
from examples.trainer.data.placement import place_batch
from examples.trainer.data.prefetch import prefetch
from examples.trainer.runs import branches, processes, speed
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.metrics import MATRICES, METRICS, Metrics
from examples.trainer.runs.profiling import Profile
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.rates import rates_by_update, updates_made
from examples.trainer.runs.signals import StopRequests
from examples.trainer.settings.command_line import DEFAULT_MACHINE
from examples.trainer.settings.run import MachineConfig, profiled_steps
from examples.trainer.system.errors import Diverged, UserError
from examples.trainer.training import sharding
from examples.trainer.training.averages import AveragedState, in_place
from examples.trainer.training.setup import TrainingSetup
from examples.trainer.training.step import Measured, TrainState


class Outcome(NamedTuple):
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
    """Trains from the last checkpoint to the end or a stop; calls `begin` before the first step."""
    metadata = functools.partial(run_folder.step_metadata, setup.config, setup.dataset.key)
    profile = Profile(profiled_steps(machine), folder, say)
    stop = StopRequests(processes.agreement(setup.mesh))
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", metadata, say))
        saved = checkpoints.manager.latest_step() or 0
        start = saved or branches.first_step(setup.config)
        if profile.steps and profile.steps[0] <= start:
            raise UserError(
                f"--profile {machine.profile}: the run goes on with step {start + 1}; give steps"
                " from there on."
            )
        state = beginning(setup, checkpoints, saved)
        if start > saved:  # of another run, which may lose its checkpoint
            checkpoints.save(start, state)
        begin(state, start)
        display.begin(start)
        metrics = stack.enter_context(Metrics(folder / METRICS, start, say))
        recorder = Recorder(setup, metrics, display, machine, updates_made(state.opt_state), start)
        if setup.config.optimizer.record_every:
            recorder.matrices = stack.enter_context(Metrics(folder / MATRICES, start, say))
        stack.enter_context(stop)
        stack.enter_context(display)
        stack.callback(profile.stop)  # of fewer steps, if the run ends before the last
        state, step = train(setup, state, start, checkpoints, recorder, stop, profile)
    return Outcome(state, step, stop.agreed if step < setup.config.steps else 0)


def beginning(setup: TrainingSetup, checkpoints: Checkpoints, saved: int) -> TrainState:
    """The state of the saved step; if there is none, that of another run or a new one."""
    if saved:
        return checkpoints.restore(saved, setup.program.abstract)
    return branches.state_of(setup) if setup.config.from_run else setup.init()


def train(
    setup: TrainingSetup,
    state: TrainState,
    step: int,
    checkpoints: Checkpoints,
    recorder: "Recorder",
    stop: StopRequests,
    profile: Profile,
) -> tuple[TrainState, int]:
    """Trains from a step to the end or a stop; returns the saved state and its step."""
    config, rows = setup.config, sharding.of_batch(setup.mesh)
    steps = range(step, config.steps)
    pending: tuple[int, Measured, float] | None = None
    with prefetch(lambda step: place_batch(setup.loader, step, rows), steps) as batches:
        while step < config.steps and not stop.stop():
            asked = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - asked
            profile.before(step + 1, pending)
            state, measured = setup.train_step(state, *batch)
            step += 1
            # The device computes this step while the figures of the previous one are written.
            if pending:
                recorder.record(*pending)
            pending = (step, measured, waited)
            recorder.record_matrices(step, state)
            evaluated = step == config.steps or step % config.eval_every == 0
            saved = step % config.checkpoint_every == 0
            if evaluated or saved or profile.ends(step):
                recorder.record(*pending)
                pending = recorder.clock = None
            if profile.ends(step):
                profile.stop()
            if evaluated:
                recorder.evaluate(step, state)
            if saved:
                checkpoints.save(step, state)
                recorder.saved = step
        if pending:
            recorder.record(*pending)
        if step > recorder.saved:
            checkpoints.save(step, state)
        checkpoints.wait_until_saved()
    return state, step


class Recorder:
    """Writes and shows the figures of steps."""

    def __init__(
        self,
        setup: TrainingSetup,
        metrics: Metrics,
        display: Observer,
        machine: MachineConfig,
        updates: int,
        saved: int,
    ):
        self.setup, self.metrics, self.display = setup, metrics, display
        self.matrices: Metrics | None = None
        """The file for records of the matrices; None if they are not recorded."""
        self.rates = rates_by_update(setup.config.optimizer, setup.config.steps)
        self.work = speed.work_of(setup, machine)
        self.updates = updates
        """How many updates were made: steps without those that were skipped."""
        self.saved = saved
        """The last step that was saved."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""
        self.recorded = 0
        """The last update whose matrices were written."""

    def record(self, step: int, measured: Measured, waited: float) -> None:
        """Waits for the figures of a step and writes them; `waited` seconds for its batch."""
        value = float(measured.loss)
        if not math.isfinite(value):
            self.skip(step)
            return
        now = time.monotonic()
        figures = {
            "train_loss": value,
            speed.GRADIENT_NORM: speed.rounded(measured.grad_norm),
            **self.rates[self.updates],
            **speed.peak_memory(),
        }
        if self.clock is not None:
            figures |= self.work.measured(now - self.clock)
            figures[speed.LOADING] = speed.rounded(waited)
        self.clock, self.skipped = now, 0
        self.updates += 1
        self.metrics.add(step, **figures)
        self.display.trained(step, figures)

    def skip(self, step: int) -> None:
        """Records a skipped step; raises `Diverged` after too many in a row."""
        self.skipped += 1
        self.metrics.add(step, skipped=self.skipped)
        self.display.skipped(step)
        self.clock = None
        if self.skipped > self.setup.config.max_skipped:
            raise Diverged(step, self.skipped, self.saved)

    def evaluate(self, step: int, state: TrainState) -> None:
        evaluation = self.setup.evaluate(state.params)
        figures = dataclasses.asdict(evaluation)
        if isinstance(state.opt_state, AveragedState):
            whole = in_place(state.params, state.opt_state.average)
            figures["val_loss_ema"] = self.setup.evaluate(whole).val_loss
        self.metrics.add(step, **figures)
        self.display.evaluated(step, evaluation)

    def record_matrices(self, step: int, state: TrainState) -> None:
        """Writes what the optimizer has recorded, unless skipped steps have delayed its record."""
        if not self.matrices or step % self.setup.config.optimizer.record_every:
            return
        record = omp.diagnostics.read(state.opt_state)
        if record.step > self.recorded:
            self.recorded = record.step
            self.matrices.add(step, update=record.step, values=record.as_json()["values"])
