"""A run in its folder: from its last checkpoint to its end or to a request to stop."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples import processes, runs
from examples.checkpoint import Checkpoints
from examples.job import Job
from examples.loop import Loop
from examples.progress import Watcher
from examples.signals import StopRequests
from examples.training import TrainState


@dataclass(frozen=True)
class Outcome:
    """Where a run is when `execute` returns."""

    state: TrainState
    step: int
    stopped_by: int
    """The signal that came before the end; 0: it is at its end."""


def execute(
    job: Job, folder: Path, display: Watcher, begin: Callable[[TrainState, int], None]
) -> Outcome:
    """Trains and writes down what is measured; `begin` is called before the first step."""
    about = functools.partial(runs.about_step, job.config, job.dataset.key)
    with Checkpoints(folder / "checkpoints", about) as checkpoints:
        start = checkpoints.latest_step()
        state = checkpoints.restore(start, job.program.abstract) if start else job.init()
        begin(state, start)
        display.begin(start)
        with (
            runs.Metrics(folder / "metrics.jsonl", start) as metrics,
            record_to(folder, job, start) as matrices,
        ):
            loop = Loop(
                job=job,
                save=checkpoints.save,
                settle=checkpoints.settle,
                stop=StopRequests(processes.Agreement(job.mesh)),
                metrics=metrics,
                matrices=matrices,
                display=display,
            )
            state, step = loop.run(state, start)
    return Outcome(state, step, loop.stop.agreed if step < job.config.steps else 0)


def record_to(
    folder: Path, job: Job, start: int
) -> contextlib.AbstractContextManager[runs.Metrics | None]:
    """Where records of the matrices go, if any are made."""
    if not job.config.optimizer.record_every:
        return contextlib.nullcontext()
    return runs.Metrics(folder / runs.MATRICES, start)
