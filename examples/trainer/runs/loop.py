"""Trains a run in its folder: steps, measurements, evaluations, checkpoints, requests to stop."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from examples.trainer.data.placement import place_batch
from examples.trainer.data.prefetch import prefetch
from examples.trainer.runs import branches, places, processes
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.metrics import MATRICES, METRICS, Metrics, read_metrics, updates_made
from examples.trainer.runs.profiling import Profile
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.recorder import EvaluationTimes, Recorder, SaveTimes, Spikes
from examples.trainer.runs.signals import StopRequests
from examples.trainer.runs.watchdog import EVALUATION, SAVE, STEP, Watchdog
from examples.trainer.settings.command_line import DEFAULT_MACHINE
from examples.trainer.settings.machines import MachineConfig, profiled_steps
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.program import TrainingSetup
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
    config = setup.config
    metadata = run_folder.metadata_of(folder, config, setup.dataset.key)
    profile = Profile(profiled_steps(machine), folder, say)
    stop = StopRequests(processes.agreement(setup.mesh))
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(places.checkpoints(folder, config), metadata, say, machine.keep_every)
        )
        saved = checkpoints.manager.latest_step() or 0
        start = saved or branches.first_step(config)
        check_profile(profile, start, machine)
        state = beginning(setup, checkpoints, saved)
        if start > saved:  # of another run, which may lose its checkpoint
            checkpoints.save(start, state)
        begin(state, start)
        display.begin(start)
        metrics = stack.enter_context(Metrics(folder / METRICS, start, say))
        past = [record for record in read_metrics(folder / METRICS) if record["step"] <= start]
        spikes = Spikes(config.skip_spikes, past)
        minutes = machine.checkpoint_minutes, machine.eval_minutes
        saves = SaveTimes(config.checkpoint_every, machine.keep_every, minutes[0], start)
        evaluations = EvaluationTimes(config.eval_every, config.steps, minutes[1], past)
        updates = updates_made(state.opt_state)
        recorder = Recorder(setup, metrics, display, machine, updates, saves, spikes)
        if config.optimizer.record_every:
            recorder.matrices = stack.enter_context(Metrics(folder / MATRICES, start, say))
        stack.enter_context(stop)
        stack.push(checkpoints.close)  # while Ctrl-C is a request: it waits for a save
        stack.enter_context(display)
        stack.callback(profile.stop)  # of fewer steps, if the run ends before the last
        watchdog = stack.enter_context(Watchdog(machine.watchdog_minutes))
        loop = Loop(setup, checkpoints, recorder, saves, evaluations, stop, profile, watchdog)
        state, step = loop.train(state, start)
    return Outcome(state, step, stop.agreed if step < config.steps else 0)


def beginning(setup: TrainingSetup, checkpoints: Checkpoints, saved: int) -> TrainState:
    """The state of the saved step; if there is none, that of another run or a new one."""
    if saved:
        return checkpoints.restore(saved, setup.program.abstract)
    return branches.state_of(setup) if setup.config.from_run else setup.init()


def check_profile(profile: Profile, start: int, machine: MachineConfig) -> None:
    if profile.steps and profile.steps[0] <= start:
        raise UserError(
            f"--profile {machine.profile}: the run goes on with step {start + 1}; give steps"
            " from there on."
        )


@dataclass
class Loop:
    """The steps of a run, and what happens between them."""

    setup: TrainingSetup
    checkpoints: Checkpoints
    recorder: Recorder
    saves: SaveTimes
    evaluations: EvaluationTimes
    stop: StopRequests
    profile: Profile
    watchdog: Watchdog
    pending: tuple[int, Measured, float, float | None] | None = None
    """The figures of a step that are not written yet."""

    def train(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Trains from a step to the end or a stop; returns the saved state and its step."""
        rows = sharding.of_batch(self.setup.mesh)
        steps = range(step, self.setup.config.steps)
        with prefetch(lambda i: place_batch(self.setup.loader, i, rows), steps) as batches:
            while step < steps.stop and not self.stops():
                self.watchdog.began(STEP)
                asked = time.monotonic()
                batch = next(batches)
                waited = time.monotonic() - asked
                self.profile.before(step + 1, self.pending)
                bound = self.recorder.spikes.bound(step + 1)
                state, measured = self.setup.train_step(state, *batch, largest_norm=bound)
                step += 1
                # The device computes this step while the figures of the previous one are written.
                self.record()
                self.pending = (step, measured, waited, bound)
                self.recorder.record_matrices(step, state)
                self.pause(step, state)
            self.record()
            if step > self.saves.last:
                self.save(step, state)
            self.watchdog.began(SAVE)
            self.checkpoints.wait_until_saved()
        return state, step

    def stops(self) -> bool:
        save, evaluate = self.saves.clock.asks(), self.evaluations.clock.asks()
        return self.stop.stop(save, self.recorder.is_slow, evaluate)

    def record(self) -> None:
        """Waits for the step whose figures are pending, and writes them."""
        if self.pending:
            pending, self.pending = self.pending, None
            self.recorder.record(*pending)

    def pause(self, step: int, state: TrainState) -> None:
        """Evaluates and saves where that is due, and else waits only for a step that is slow."""
        evaluated = self.evaluations.is_due(step, self.stop.evaluate)
        saved = self.saves.is_due(step, self.stop.save)
        if evaluated or saved or self.profile.ends(step) or self.stop.waits:
            self.record()
        if evaluated or saved or self.profile.ends(step):
            self.recorder.clock = None
        if self.profile.ends(step):
            self.profile.stop()
        if evaluated:
            self.watchdog.began(EVALUATION)
            self.recorder.evaluate(step, state)
            self.evaluations.clock.restart()
        if saved:
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        self.watchdog.began(SAVE)
        self.checkpoints.save(step, state)
        self.saves.saved(step)
