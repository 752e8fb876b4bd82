"""Writes and shows the figures of steps."""

import math
import statistics
import time
from collections import deque

import numpy as np

import optax_muonplus as omp
from examples.trainer.runs import speed
from examples.trainer.runs.metrics import Metrics
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.rates import LearningRates
from examples.trainer.runs.spikes import Spikes
from examples.trainer.runs.times import SaveTimes
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system.errors import Diverged
from examples.trainer.training.program import TrainingSetup
from examples.trainer.training.step import Measured, TrainState
from examples.trainer.training.transformations import AveragedState, first_update, with_averages

SLOW = 1.0  # seconds; longer steps gain nothing from one that waits behind them
TIMED = 20  # steps whose median decides it


class Recorder:
    """Writes and shows the figures of steps."""

    def __init__(
        self,
        setup: TrainingSetup,
        metrics: Metrics,
        display: Observer,
        machine: MachineConfig,
        updates: int,
        saves: SaveTimes,
        spikes: Spikes,
    ):
        self.setup, self.metrics, self.display = setup, metrics, display
        self.saves, self.spikes = saves, spikes
        self.matrices: Metrics | None = None
        """The file for records of the matrices; None if they are not recorded."""
        self.rates = LearningRates(setup.config.optimizer, setup.config.steps)
        self.work = speed.work_of(setup, machine)
        self.updates = updates
        """How many updates were made: steps without those that were skipped."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""
        self.seconds: deque[float] = deque(maxlen=TIMED)
        """Durations of the last steps."""
        self.recorded = 0
        """The last update whose matrices were written."""

    @property
    def is_slow(self) -> bool:
        """Whether steps take so long that the next one should not wait behind the current one."""
        return bool(self.seconds) and statistics.median(self.seconds) > SLOW

    def record(self, step: int, measured: Measured, waited: float, bound: float | None) -> None:
        """Waits for the figures of a step and writes them; `waited` seconds for its batch."""
        value = float(measured.loss)
        if not math.isfinite(value):
            self.skip(step)
            return
        norm = speed.rounded(measured.grad_norm)
        self.spikes.add(step, norm)
        # The comparison that the step itself has made.
        if bound is not None and np.float32(measured.grad_norm) > np.float32(bound):
            self.leave_out(step, norm, bound)
            return
        now = time.monotonic()
        figures = {
            "train_loss": value,
            speed.GRADIENT_NORM: norm,
            **self.rates.of(self.updates),
            **speed.peak_memory(),
        }
        if self.clock is not None:
            self.seconds.append(now - self.clock)
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
            raise Diverged(step, self.skipped, self.saves.last)

    def leave_out(self, step: int, norm: float, bound: float) -> None:
        """Records a step whose gradient was too large, which changed nothing."""
        self.metrics.add(step, **{speed.GRADIENT_NORM: norm, "skipped_above": speed.rounded(bound)})
        self.display.left_out(step, norm, bound)
        self.clock = None

    def evaluate(self, step: int, state: TrainState) -> None:
        evaluation = self.setup.evaluate(state.params)
        figures = evaluation.figures()
        rule, last = self.setup.config.optimizer, self.setup.config.steps
        # Before its first update a tail's average is the weights themselves.
        if isinstance(state.opt_state, AveragedState) and self.updates > first_update(rule, last):
            whole = with_averages(state.params, state.opt_state.average)
            name = "val_loss_ema" if rule.ema else "val_loss_tail"
            figures[name] = self.setup.evaluate(whole).val_loss
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
