"""Trains a run in its folder: steps, measurements, evaluations, checkpoints, requests to stop."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from examples.trainer.data.placement import place_batch, prefetch
from examples.trainer.runs import branches, checkpoint, processes
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.progress import Observer
from examples.trainer.runs.recorder import Due, Profile, Recorder
from examples.trainer.runs.stops import StopRequests
from examples.trainer.settings.command_line import DEFAULT_MACHINE
from examples.trainer.settings.machines import MachineConfig
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
    machine: MachineConfig = DEFAULT_MACHINE,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Trains from the last checkpoint to the end or a stop.

    Calls `show_setup` with the initial state and its step.
    """
    config, rows = setup.config, sharding.of_batch(setup.mesh)
    metadata = run_folder.metadata_of(folder, config, setup.dataset.key)
    stop = StopRequests(processes.agreement(setup.mesh))
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(checkpoint.place_of(folder, config), metadata, say, machine.keep_every)
        )
        state, step = init_state(setup, checkpoints)
        profile = Profile(machine, step, folder, say)
        show_setup(state, step)
        recorder = stack.enter_context(
            Recorder(setup, folder, observers, machine, state, step, say)
        )
        saves = Due(config.checkpoint_every, machine.checkpoint_minutes)
        evaluations = Due(config.eval_every, machine.eval_minutes, recorder.since_evaluation)
        stack.enter_context(stop)
        stack.push(checkpoints.close)  # Ctrl-C is a request there too: closing waits for a save
        for observer in observers:
            observer.begin(step)
            stack.callback(observer.close)
        stack.callback(profile.stop)  # the run may end before the last step of the trace
        steps = range(step, config.steps)
        batches = stack.enter_context(prefetch(lambda i: place_batch(setup.loader, i, rows), steps))

        def stops() -> bool:
            return stop.stop(saves.asks(), recorder.is_slow, evaluations.asks())

        def save() -> None:
            checkpoints.save(step, state)
            recorder.saved = step
            saves.restart()

        def evaluate() -> None:
            recorder.evaluate(step, state)
            evaluations.restart()

        while step < config.steps and not stops():
            asked = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - asked
            profile.before(step + 1, recorder.pending)
            bound = recorder.spikes.bound(step + 1)
            state, measured = setup.train_step(state, *batch, largest_norm=bound)
            step += 1
            # The devices compute this step while the figures of the one before it are written.
            recorder.add(step, measured, waited, bound)
            recorder.record_matrices(step, state)
            is_evaluated = evaluations.is_due(step, stop.evaluate) or step == config.steps
            is_kept = machine.keep_every > 0 and step % machine.keep_every == 0
            is_saved = saves.is_due(step, stop.save) or is_kept
            if is_evaluated or is_saved or profile.ends(step):
                recorder.pause()
            elif stop.waits:
                recorder.write()
            if profile.ends(step):
                profile.stop()
            if is_evaluated:
                evaluate()
            if is_saved:
                save()
        recorder.write()
        if step > recorder.saved:
            save()
        checkpoints.wait_until_saved()
    return Outcome(state, step, stop.agreed if step < config.steps else 0)


def init_state(setup: TrainingSetup, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The state that a run goes on from, and its step: saved, of another run, or a new one."""
    if saved := checkpoints.manager.latest_step():
        return checkpoints.restore(saved, setup.program.abstract), saved
    if not setup.config.from_run:
        return setup.init(), 0
    state, step = branches.init_from_origin(setup)
    checkpoints.save(step, state)  # the other run may lose its checkpoint
    return state, step
