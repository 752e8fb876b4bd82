"""The training loop: steps, measurements, evaluations, checkpoints, and requests to stop."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

import optax_muonplus as omp
from examples.data.placement import place_batch
from examples.runs.metrics import Metrics
from examples.runs.progress import Observer
from examples.runs.signals import StopRequests
from examples.system.errors import Diverged
from examples.training import sharding
from examples.training.setup import TrainingSetup
from examples.training.step import TrainState


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
    saved: int = 0
    """The last step that was saved."""
    skipped: int = 0
    """How many steps in a row, up to the last recorded one, were skipped."""
    recorded: int = 0
    """The last update whose matrices were written."""
    clock: tuple[int, float] | None = None
    """The step and time from which speed is measured; None at the start and after a pause."""

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Trains from step `start` to the end or a stop; returns the saved state and its step."""
        rows = sharding.of_batch(self.setup.mesh)
        step = self.saved = start
        pending: tuple[int, jax.Array] | None = None
        with self.stop, self.display:
            while step < self.setup.config.steps and not self.stop.stop():
                batch = place_batch(self.setup.loader, step, rows)
                state, loss = self.setup.train_step(state, *batch)
                step += 1
                # The device computes this step while the loss of the previous one is written.
                if pending:
                    self.record(*pending)
                pending = (step, loss)
                if self.matrices and step % self.setup.config.optimizer.record_every == 0:
                    self.record_matrices(self.matrices, step, state)
                if self.is_due(step):
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
        """Evaluates and saves if that is due after a step."""
        config = self.setup.config
        if step == config.steps or step % config.eval_every == 0:
            evaluation = self.setup.evaluate(state.params)
            self.metrics.add(step, **dataclasses.asdict(evaluation))
            self.display.evaluated(step, evaluation)
        if step % config.checkpoint_every == 0:
            self.save(step, state)
            self.saved = step
        self.clock = None

    def record(self, step: int, loss: jax.Array) -> None:
        """Waits for the loss of a step and writes it."""
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
            tokens = (
                (step - self.clock[0]) * self.setup.loader.batch_size * self.setup.loader.context
            )
            measured["tokens_per_second"] = round(tokens / (now - self.clock[1]), 1)
        self.metrics.add(step, **measured)
        self.display.trained(step, value, measured.get("tokens_per_second"))

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
