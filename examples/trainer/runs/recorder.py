"""Writes and shows the figures of steps, and says which steps are saved, evaluated or left out.

Steps count in all processes alike. Time counts in process 0, whose wish the others learn by an
agreement before the next step.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import optax_muonplus as omp
from examples.trainer.runs.metrics import (
    DURATION,
    GRADIENT_NORM,
    LOADING,
    LearningRates,
    Metrics,
    peak_memory,
    rounded,
    work_of,
)
from examples.trainer.runs.processes import is_first
from examples.trainer.runs.progress import Observer
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system.errors import Diverged
from examples.trainer.training.program import TrainingSetup
from examples.trainer.training.step import Measured, TrainState
from examples.trainer.training.transformations import AveragedState, first_update, with_averages

WINDOW = 128  # steps that the bound is made from; without half of them there is none
BEHIND = 2  # a step is prepared while the one before it still runs, whose norm is not known


class Spikes:
    """Bounds the norm of the gradient of a step by the norms of the steps before it.

    The bound of step t is mean + `deviations` x standard deviation of the norms of the last 128
    steps up to step t - 2, also of those that were left out, so that a norm which rises for good is
    accepted after a while. This is the rule of OLMo's SkipStepOptimizer, for the norm alone
    (allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py). With `deviations` None there is
    no bound.
    """

    def __init__(self, deviations: float | None, records: Iterable[dict[str, Any]]):
        """`records` are those of the run so far."""
        self.deviations = deviations
        self.norms: deque[tuple[int, float]] = deque(maxlen=WINDOW + BEHIND)
        if deviations is not None:
            for record in records:
                self.add(record["step"], record.get(GRADIENT_NORM, math.nan))

    def add(self, step: int, norm: float) -> None:
        if math.isfinite(norm):
            self.norms.append((step, norm))

    def bound(self, step: int) -> float | None:
        """The largest norm that this step may have; None without this check."""
        if self.deviations is None:
            return None
        known = [norm for at, norm in self.norms if at <= step - BEHIND][-WINDOW:]
        if len(known) < WINDOW // 2:
            return math.inf
        return statistics.fmean(known) + self.deviations * statistics.stdev(known)


class Clock:
    """Wants something so many minutes after the last time; never with 0 minutes."""

    def __init__(self, minutes: float, gone: float = 0.0):
        """`gone` seconds of the first minutes are over already."""
        self.seconds = 60 * minutes
        self.since = time.monotonic() - gone
        self.asked = False

    def asks(self) -> bool:
        """Whether this process wants it, by its clock; true once until the clock is restarted."""
        due = self.seconds > 0 and time.monotonic() - self.since >= self.seconds
        if self.asked or not due or not is_first():
            return False
        self.asked = True
        return True

    def restart(self) -> None:
        self.since, self.asked = time.monotonic(), False


class SaveTimes:
    """Says at which steps to save."""

    def __init__(self, every: int, keep_every: int, minutes: float, step: int):
        self.every = every
        self.keep_every = keep_every
        self.clock = Clock(minutes)
        self.last = step
        """The last step that was saved."""

    def is_due(self, step: int, wanted: bool) -> bool:
        """Whether to save this step; `wanted` is what the processes have agreed on."""
        kept = self.keep_every > 0 and step % self.keep_every == 0
        return wanted or kept or step % self.every == 0

    def saved(self, step: int) -> None:
        self.last = step
        self.clock.restart()


class EvaluationTimes:
    """Says at which steps to evaluate."""

    def __init__(
        self, every: int, steps: int, minutes: float, records: Sequence[dict[str, Any]] = ()
    ):
        """The time goes on from the last evaluation in `records`, those of the run so far."""
        self.every = every
        self.steps = steps
        self.clock = Clock(minutes, seconds_since_evaluation(records))

    def is_due(self, step: int, wanted: bool) -> bool:
        """Whether to evaluate after this step; `wanted` is what the processes have agreed on."""
        return wanted or step == self.steps or step % self.every == 0


def seconds_since_evaluation(records: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps after the last evaluation, as far as they were measured."""
    at = [i for i, record in enumerate(records) if "val_loss" in record]
    after = records[at[-1] + 1 :] if at else records
    return math.fsum(record.get(DURATION, 0.0) for record in after)


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
        self.work = work_of(setup, machine)
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
        norm = rounded(measured.grad_norm)
        self.spikes.add(step, norm)
        # The comparison that the step itself has made.
        if bound is not None and np.float32(measured.grad_norm) > np.float32(bound):
            self.leave_out(step, norm, bound)
            return
        now = time.monotonic()
        figures = {
            "train_loss": value,
            GRADIENT_NORM: norm,
            **self.rates.of(self.updates),
            **peak_memory(),
        }
        if self.clock is not None:
            self.seconds.append(now - self.clock)
            figures |= self.work.measured(now - self.clock)
            figures[LOADING] = rounded(waited)
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
        self.metrics.add(step, **{GRADIENT_NORM: norm, "skipped_above": rounded(bound)})
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
