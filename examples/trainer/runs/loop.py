"""Trains a run in its folder: steps, measurements, evaluations, checkpoints, requests to stop."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from examples.trainer.data.loader import place_batch, prefetch
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import processes
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.recorder import Observer, Recorder
from examples.trainer.runs.stops import StopRequests
from examples.trainer.training import sharding
from examples.trainer.training.program import TrainingSetup
from examples.trainer.training.step import TrainState


class Outcome(NamedTuple):
    """The state of a run when `execute` returns."""

    state: TrainState
    step: int
    stopped_by: int
    """The signal that stopped the run; 0 if it reached its end."""


def execute(
    setup: TrainingSetup,
    folder: Path,
    observers: Sequence[Observer],
    show_setup: Callable[[TrainState, int], None],
    say: Callable[[str], None] = print,
) -> Outcome:
    """Trains from the last checkpoint to the end or a stop.

    Calls `show_setup` with the initial state and its step.
    """
    config, rows = setup.config, sharding.of_batch(setup.mesh)
    metadata = run_folder.metadata_of(folder, config, setup.dataset.key)
    stop = StopRequests(processes.agreement(setup.mesh))
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", metadata))
        state, step = init_state(setup, checkpoints)
        run_folder.keep_steps(folder, config, setup.dataset.key)
        show_setup(state, step)
        recorder = stack.enter_context(Recorder(setup, folder, observers, state, step, say))
        stack.enter_context(stop)
        stack.push(checkpoints.close)  # Ctrl-C is a request there too: closing waits for a save
        for observer in observers:
            observer.begin(step)
            stack.callback(observer.close)
        steps = range(step, config.steps)
        batches = stack.enter_context(prefetch(lambda i: place_batch(setup.loader, i, rows), steps))

        def save() -> None:
            checkpoints.save(step, state)
            recorder.saved = step

        while step < config.steps and not stop.stop(recorder.is_slow):
            asked = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - asked
            state, measured = setup.train_step(state, *batch)
            step += 1
            # The devices compute this step while the figures of the one before it are written.
            recorder.add(step, measured, waited)
            is_evaluated = step % config.eval_every == 0 or step == config.steps
            is_saved = step % config.checkpoint_every == 0
            if is_evaluated or is_saved:
                recorder.pause()
            elif stop.waits:
                recorder.write()
            if is_evaluated:
                recorder.evaluate(step, state)
            if is_saved:
                save()
        recorder.write()
        if step > recorder.saved:
            save()
        checkpoints.wait_until_saved()
    return Outcome(state, step, stop.agreed if step < config.steps else 0)


def init_state(setup: TrainingSetup, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The state that a run goes on from, and its step: saved, or new."""
    if saved := checkpoints.manager.latest_step():
        return checkpoints.restore(saved, setup.program.abstract), saved
    return setup.init(), 0
