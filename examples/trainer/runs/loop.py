"""The training loop: steps, measurements, evaluations, checkpoints, and requests to stop."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import optax_muonplus as omp
from examples.trainer.data.placement import place_batch
from examples.trainer.data.prefetch import Prefetch
from examples.trainer.runs import speed
from examples.trainer.runs.metrics import Metrics
from examples.trainer.runs.profiling import Profile
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.rates import LearningRates, updates_made
from examples.trainer.runs.signals import StopRequests
from examples.trainer.system.errors import Diverged
from examples.trainer.training import sharding
from examples.trainer.training.setup import TrainingSetup
from examples.trainer.training.step import Measured, TrainState


@dataclass
class Loop:
    """The steps of a run, and the state of the loop between them."""

    setup: TrainingSetup
    save: Callable[[int, TrainState], None]
    """Begins to save the state; it is on disk when `wait_until_saved` has returned."""
    wait_until_saved: Callable[[], None]
    stop: StopRequests
    metrics: Metrics
    matrices: Metrics | None
    """The file for records of the matrices; None if they are not recorded."""
    display: Observer
    work: speed.Work
    """What a step does, for the figures of speed."""
    profile: Profile
    saved: int = 0
    """The last step that was saved."""
    skipped: int = 0
    """How many steps in a row, up to the last recorded one, were skipped."""
    recorded: int = 0
    """The last update whose matrices were written."""
    updates: int = 0
    """How many updates were made: steps without those that were skipped."""
    clock: float | None = None
    """When the last step ended, from which the next is timed; None at the start and after a
    pause."""

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Trains from step `start` to the end or a stop; returns the saved state and its step."""
        setup, rows = self.setup, sharding.of_batch(self.setup.mesh)
        self.rates = LearningRates(setup.config.optimizer, setup.config.steps)
        self.updates = updates_made(state.opt_state)
        step = self.saved = start
        pending: tuple[int, Measured, float] | None = None
        ahead = Prefetch(
            lambda step: place_batch(setup.loader, step, rows), range(start, setup.config.steps)
        )
        with self.stop, self.display, self.profile, ahead:
            while step < setup.config.steps and not self.stop.stop():
                asked = time.monotonic()
                batch = next(ahead)
                waited = time.monotonic() - asked
                self.profile.before(step + 1, pending)
                state, measured = setup.train_step(state, *batch)
                step += 1
                # The device computes this step while the figures of the previous one are written.
                if pending:
                    self.record(*pending)
                pending = (step, measured, waited)
                if self.matrices and step % setup.config.optimizer.record_every == 0:
                    self.record_matrices(self.matrices, step, state)
                if self.is_due(step) or self.profile.ends(step):
                    self.record(*pending)
                    pending = None
                    self.pause(step, state)
            if pending:
                self.record(*pending)
            if step > self.saved:
                self.save(step, state)
            self.wait_until_saved()
        return state, step

    def is_due(self, step: int) -> bool:
        """Whether an evaluation or a checkpoint follows a step."""
        config = self.setup.config
        every = (config.eval_every, config.checkpoint_every, config.steps)
        return any(step % n == 0 for n in every)

    def pause(self, step: int, state: TrainState) -> None:
        """Ends the trace, evaluates and saves, each if it is due after a step."""
        config = self.setup.config
        if self.profile.ends(step):
            self.profile.stop()
        if step == config.steps or step % config.eval_every == 0:
            evaluation = self.setup.evaluate(state.params)
            self.metrics.add(step, **dataclasses.asdict(evaluation))
            self.display.evaluated(step, evaluation)
        if step % config.checkpoint_every == 0:
            self.save(step, state)
            self.saved = step
        self.clock = None

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
            **self.rates.of(self.updates),
            **speed.peak_memory(),
        }
        if self.clock is not None:
            figures |= self.work.measured(now - self.clock)
            figures[speed.LOADING] = speed.rounded(waited)
        self.clock, self.skipped = now, 0
        self.updates += 1
        self.metrics.add(step, **figures)
        self.display.trained(step, figures)

    def record_matrices(self, matrices: Metrics, step: int, state: TrainState) -> None:
        """Writes what the optimizer has recorded, unless skipped steps have delayed its record."""
        record = omp.diagnostics.read(state.opt_state)
        if record.step > self.recorded:
            self.recorded = record.step
            values = record.as_json()["values"]
            matrices.add(step, update=record.step, values=values)

    def skip(self, step: int) -> None:
        """Records a skipped step; raises `Diverged` after too many in a row."""
        self.skipped += 1
        self.metrics.add(step, skipped=self.skipped)
        self.display.skipped(step)
        self.clock = None
        if self.skipped > self.setup.config.max_skipped:
            raise Diverged(step, self.skipped, self.saved)
