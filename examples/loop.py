"""The training loop: steps, measurements, evaluations, checkpoints, and requests to stop."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

import optax_muonplus as omp
from examples import sharding
from examples.data.placement import place_batch
from examples.errors import Diverged
from examples.job import Job
from examples.progress import Watcher
from examples.runs import Metrics
from examples.signals import StopRequests
from examples.training import TrainState


@dataclass
class Loop:
    """What the steps of a run need."""

    job: Job
    save: Callable[[int, TrainState], None]
    """Begins to save the state; it is on disk when `settle` has returned."""
    settle: Callable[[], None]
    stop: StopRequests
    metrics: Metrics
    matrices: Metrics | None
    """For the records of the matrices, if they are asked for."""
    display: Watcher
    saved: int = 0
    """The last step that was saved."""
    skipped: int = 0
    """Steps in a row, up to the last recorded one, that changed nothing."""
    recorded: int = 0
    """The last update whose matrices were written down."""
    clock: tuple[int, float] | None = None
    """The step and time from which speed is measured; None after a pause and at the start."""

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Trains from `start` steps to the end or to a stop; the state, saved, and its step."""
        place = sharding.of_batch(self.job.mesh)
        step = self.saved = start
        waiting: tuple[int, jax.Array] | None = None
        with self.stop, self.display:
            while step < self.job.config.steps and not self.stop.stop():
                batch = place_batch(self.job.loader, step, place)
                state, loss = self.job.train_step(state, *batch)
                step += 1
                # The device works on this step while the loss of the one before is written.
                if waiting:
                    self.record(*waiting)
                waiting = (step, loss)
                if self.matrices and step % self.job.config.optimizer.record_every == 0:
                    self.record_matrices(self.matrices, step, state)
                if self.is_due(step):
                    self.record(*waiting)
                    waiting = None
                    self.pause(step, state)
            if waiting:
                self.record(*waiting)
            if step > self.saved:
                self.save(step, state)
            self.settle()
        return state, step

    def is_due(self, step: int) -> bool:
        """Whether a step is followed by an evaluation or a checkpoint."""
        config = self.job.config
        every = (config.eval_every, config.checkpoint_every, config.steps)
        return any(step % n == 0 for n in every)

    def pause(self, step: int, state: TrainState) -> None:
        """Evaluates and saves as is due after a step."""
        config = self.job.config
        if step == config.steps or step % config.eval_every == 0:
            evaluation = self.job.evaluate(state.params)
            self.metrics.add(step, **dataclasses.asdict(evaluation))
            self.display.evaluated(step, evaluation)
        if step % config.checkpoint_every == 0:
            self.save(step, state)
            self.saved = step
        self.clock = None

    def record(self, step: int, loss: jax.Array) -> None:
        """Waits for the loss of a step and writes it down."""
        value = float(loss)
        if not math.isfinite(value):
            self.skip(step)
            return
        self.skipped = 0
        now = time.monotonic()
        measured = {"train_loss": value}
        if self.clock is None:
            self.clock = (step, now)
        else:
            tokens = (step - self.clock[0]) * self.job.loader.batch_size * self.job.loader.context
            measured["tokens_per_second"] = round(tokens / (now - self.clock[1]), 1)
        self.metrics.add(step, **measured)
        self.display.trained(step, value, measured.get("tokens_per_second"))

    def record_matrices(self, matrices: Metrics, step: int, state: TrainState) -> None:
        """Writes down what the optimizer has recorded, unless skipped steps have delayed it."""
        record = omp.diagnostics.read(state.opt_state)
        if record.step > self.recorded:
            self.recorded = record.step
            values = record.as_json()["values"]
            matrices.add(step, update=record.step, values=values)

    def skip(self, step: int) -> None:
        """Notes a step whose loss or gradient was not finite; stops after too many in a row."""
        self.skipped += 1
        self.metrics.add(step, skipped=self.skipped)
        self.display.skipped(step)
        self.clock = None
        if self.skipped > self.job.config.max_skipped:
            raise Diverged(step, self.skipped, self.saved)
