"""Writes and shows the figures of steps, and says which steps are saved, evaluated or left out.

Steps count in all processes alike. Time counts in process 0, whose wish the others learn by an
agreement before the next step.
"""

import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import optax_muonplus as omp
from examples.trainer.runs.metrics import (
    DURATION,
    GRADIENT_NORM,
    LOADING,
    MATRICES,
    METRICS,
    LearningRates,
    Metrics,
    peak_memory,
    read_metrics,
    rounded,
    updates_made,
    work_of,
)
from examples.trainer.runs.processes import is_first
from examples.trainer.runs.progress import Observer
from examples.trainer.settings.machines import MachineConfig, profiled_steps
from examples.trainer.system.errors import Diverged, UserError
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


class Due:
    """Something that is due every so many steps, and so many minutes after the last time."""

    def __init__(self, every: int, minutes: float, gone: float = 0.0):
        """Never by time with 0 `minutes`; `gone` seconds of the first ones are over already."""
        self.every, self.seconds = every, 60 * minutes
        self.since = time.monotonic() - gone
        self.asked = False

    def asks(self) -> bool:
        """Whether this process wants it, by its clock; true once until `restart`."""
        late = self.seconds > 0 and time.monotonic() - self.since >= self.seconds
        if self.asked or not late or not is_first():
            return False
        self.asked = True
        return True

    def is_due(self, step: int, agreed: bool) -> bool:
        """Whether it is due after this step; `agreed` is what all processes follow."""
        return agreed or step % self.every == 0

    def restart(self) -> None:
        self.since, self.asked = time.monotonic(), False


def seconds_since_evaluation(records: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps after the last evaluation, as far as they were measured."""
    at = [i for i, record in enumerate(records) if "val_loss" in record]
    after = records[at[-1] + 1 :] if at else records
    return math.fsum(record.get(DURATION, 0.0) for record in after)


class Profile:
    """A trace of some steps by the profiler of JAX, which process 0 records."""

    def __init__(self, machine: MachineConfig, step: int, folder: Path, say: Callable[[str], None]):
        self.steps = profiled_steps(machine)
        self.folder, self.say, self.running = folder / "profile", say, False
        if self.steps and self.steps[0] <= step:
            raise UserError(
                f"--profile {machine.profile}: the run goes on with step {step + 1}; give steps"
                " from there on."
            )

    def before(self, step: int, waiting: Any) -> None:
        """Starts the trace if this step is its first; `waiting` are results of the step before."""
        if self.steps is None or step != self.steps[0] or not is_first():
            return
        jax.block_until_ready(waiting)  # else the trace would begin within that step
        jax.profiler.start_trace(self.folder)
        self.running = True

    def ends(self, step: int) -> bool:
        return self.running and self.steps is not None and step == self.steps[-1]

    def stop(self) -> None:
        """Writes the trace if one is running; the results of its steps must be there."""
        if not self.running:
            return
        self.running = False
        jax.profiler.stop_trace()
        where = shlex.quote(str(self.folder))
        self.say(
            f"trace written to {where}; to see it:\n"
            f"  pip install xprof && xprof --port 8791 {where}   # then http://localhost:8791\n"
            "or open the .trace.json.gz that is in it at https://ui.perfetto.dev"
        )


SLOW = 1.0  # seconds; longer steps gain nothing from one that waits behind them
TIMED = 20  # steps whose median decides it


class Recorder:
    """Writes and shows the figures of steps, those of a step while the next one is computed."""

    def __init__(
        self,
        setup: TrainingSetup,
        folder: Path,
        observers: Sequence[Observer],
        machine: MachineConfig,
        state: TrainState,
        step: int,
        say: Callable[[str], None],
    ):
        """The records in the folder are kept up to `step`, after which `state` is."""
        config = setup.config
        self.setup, self.observers = setup, observers
        self.metrics = Metrics(folder / METRICS, step, say)
        self.matrices = (
            Metrics(folder / MATRICES, step, say) if config.optimizer.record_every else None
        )
        past = [record for record in read_metrics(folder / METRICS) if record["step"] <= step]
        self.since_evaluation = seconds_since_evaluation(past)
        self.spikes = Spikes(config.skip_spikes, past)
        self.rates = LearningRates(config.optimizer, config.steps)
        self.work = work_of(setup, machine)
        self.updates = updates_made(state.opt_state)
        """How many updates were made: steps without those that were skipped."""
        self.saved = step
        """The last step that was saved."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.pending: tuple[int, Measured, float, float | None] | None = None
        """The figures of a step that are not written yet."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""
        self.seconds: deque[float] = deque(maxlen=TIMED)
        """Durations of the last steps."""
        self.recorded = 0
        """The last update whose matrices were written."""

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        for file in filter(None, (self.matrices, self.metrics)):
            file.__exit__(*error)

    @property
    def is_slow(self) -> bool:
        """Whether steps take so long that the next one should not wait behind the current one."""
        return bool(self.seconds) and statistics.median(self.seconds) > SLOW

    def add(self, step: int, measured: Measured, waited: float, bound: float | None) -> None:
        """Takes the figures of a step, which waited so long for its batch; writes the last ones."""
        self.write()
        self.pending = (step, measured, waited, bound)

    def pause(self) -> None:
        """Writes all figures; the next step is not timed, as something else comes before it."""
        self.write()
        self.clock = None

    def write(self) -> None:
        """Waits for the step whose figures are pending, and writes them."""
        if not self.pending:
            return
        (step, measured, waited, bound), self.pending = self.pending, None
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
        self.record(step, figures)

    def record(self, step: int, figures: dict[str, Any]) -> None:
        self.metrics.add(step, **figures)
        for observer in self.observers:
            observer.record(step, figures)

    def skip(self, step: int) -> None:
        """Records a skipped step; raises `Diverged` after too many in a row."""
        self.skipped += 1
        self.record(step, {"skipped": self.skipped})
        self.clock = None
        if self.skipped > self.setup.config.max_skipped:
            raise Diverged(step, self.skipped, self.saved)

    def leave_out(self, step: int, norm: float, bound: float) -> None:
        """Records a step whose gradient was too large, which changed nothing."""
        self.record(step, {GRADIENT_NORM: norm, "skipped_above": rounded(bound)})
        self.clock = None

    def evaluate(self, step: int, state: TrainState) -> None:
        figures = self.setup.evaluate(state.params).figures()
        rule, last = self.setup.config.optimizer, self.setup.config.steps
        # Before its first update a tail's average is the weights themselves.
        if isinstance(state.opt_state, AveragedState) and self.updates > first_update(rule, last):
            whole = with_averages(state.params, state.opt_state.average)
            name = "val_loss_ema" if rule.ema else "val_loss_tail"
            figures[name] = self.setup.evaluate(whole).val_loss
        self.record(step, figures)

    def record_matrices(self, step: int, state: TrainState) -> None:
        """Writes what the optimizer has recorded, unless skipped steps have delayed its record."""
        if not self.matrices or step % self.setup.config.optimizer.record_every:
            return
        record = omp.diagnostics.read(state.opt_state)
        if record.step > self.recorded:
            self.recorded = record.step
            self.matrices.add(step, update=record.step, values=record.as_json()["values"])
