"""Writes and shows the figures of the steps of a run."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from examples.trainer.runs.metrics import (
    GRADIENT_NORM,
    LOADING,
    METRICS,
    Metrics,
    peak_memory,
    rounded,
    updates_made,
    work_of,
)
from examples.trainer.system.errors import Diverged
from examples.trainer.training import optimizers
from examples.trainer.training.program import TrainingSetup
from examples.trainer.training.step import Measured, TrainState

SLOW = 1.0  # seconds; longer steps gain nothing from one that waits behind them
TIMED = 20  # steps whose median decides it
MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite; one more ends the run


class Observer(Protocol):
    """Follows a run."""

    def begin(self, step: int) -> None:
        """The run goes on after this step."""

    def record(self, step: int, figures: dict[str, Any]) -> None:
        """A record of `metrics.jsonl` was written."""

    def close(self) -> None:
        """The run has ended."""


class Recorder:
    """Writes and shows the figures of steps, those of a step while the next one is computed."""

    def __init__(
        self,
        setup: TrainingSetup,
        folder: Path,
        observers: Sequence[Observer],
        state: TrainState,
        step: int,
        say: Callable[[str], None],
    ):
        """The records in the folder are kept up to `step`, after which `state` is."""
        self.setup, self.observers = setup, observers
        self.metrics = Metrics(folder / METRICS, step, say)
        self.rates = jax.jit(optimizers.schedules(setup.config.optimizer, setup.config.steps))
        self.work = work_of(setup)
        self.updates = updates_made(state.opt_state)
        """How many updates were made: steps without those that were skipped."""
        self.saved = step
        """The last step that was saved."""
        self.skipped = 0
        """How many steps in a row, up to the last recorded one, were skipped."""
        self.pending: tuple[int, Measured, float] | None = None
        """The figures of a step that are not written yet."""
        self.clock: float | None = None
        """When the last step ended, from which the next is timed; None after a pause."""
        self.seconds: deque[float] = deque(maxlen=TIMED)
        """Durations of the last steps."""

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.metrics.__exit__(*error)

    @property
    def is_slow(self) -> bool:
        """Whether steps take so long that the next one should not wait behind the current one."""
        return bool(self.seconds) and statistics.median(self.seconds) > SLOW

    def add(self, step: int, measured: Measured, waited: float) -> None:
        """Takes the figures of a step, which waited so long for its batch; writes the last ones."""
        self.write()
        self.pending = (step, measured, waited)

    def pause(self) -> None:
        """Writes all figures; the next step is not timed, as something else comes before it."""
        self.write()
        self.clock = None

    def write(self) -> None:
        """Waits for the step whose figures are pending, and writes them."""
        if not self.pending:
            return
        (step, measured, waited), self.pending = self.pending, None
        value = float(measured.loss)
        if not math.isfinite(value):
            self.skip(step)
            return
        now = time.monotonic()
        matrices, rest = map(rounded, self.rates(self.updates))
        figures = {
            "train_loss": value,
            GRADIENT_NORM: rounded(measured.grad_norm),
            "optim/learning_rate": matrices,
            "optim/adam_lr": rest,
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
        if self.skipped > MAX_SKIPPED:
            raise Diverged(step, self.skipped, self.saved)

    def evaluate(self, step: int, state: TrainState) -> None:
        self.record(step, self.setup.evaluate(state.params).figures())
