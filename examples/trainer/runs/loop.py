"""Trains a run in its folder: steps, measurements, evaluations, checkpoints, requests to stop."""

import contextlib
import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from examples.trainer.data.loader import Loader, enough, place_batch
from examples.trainer.data.token_files import Dataset
from examples.trainer.models import sharding
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.metrics import Display, Recorder, Tracker, work_of
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from examples.trainer.training.evaluate import batches, evaluate
from examples.trainer.training.step import Functions, TrainState, shardings_of

# glibc gives large arrays back to the system when they are free, so that every step on a CPU asks
# for its memory again, and the system fills that with zeros: a third of the time of a small model.
# Up to 512 MB stay with the process instead. The numbers are those of malloc.h.
for variable, option in (("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1)):
    if variable not in os.environ:
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(option, 2**29)


class StopRequests:
    """Turns Ctrl-C and SIGTERM into a request to stop; a second Ctrl-C interrupts.

    With several processes JAX's preemption service handles SIGTERM, and finds a step after which
    all of them stop.
    """

    def __init__(self):
        self.signal = 0
        """The signal that the run stops for; 0 as long as it continues."""

    def __enter__(self) -> "StopRequests":
        numbers = [signal.SIGINT] + [signal.SIGTERM] * (jax.process_count() == 1)
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if jax.process_count() == 1:
            self.signal = self.signal or number
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self, step: int) -> bool:
        """Whether to stop after `step` steps; called before each step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything about a run except its folder and its progress; holds no arrays."""

    config: RunConfig
    mesh: Mesh
    dataset: Dataset
    functions: Functions

    @property
    def loader(self) -> Loader:
        """The batches of the run."""
        size = (self.config.model.context, self.config.batch_size, self.config.seed)
        return Loader(self.dataset.train.ids, *size)


def make_run(
    config: RunConfig,
    dataset: Dataset,
    mesh: Mesh,
    make: Callable[[RunConfig, int, Mesh], Functions],
) -> Run:
    """A run, whose functions `make` makes; refuses too little text, and rows that do not divide."""
    check_rows(config, mesh)
    run = Run(config, mesh, dataset, make(config, dataset.tokenizer.get_vocab_size(), mesh))
    enough(run.loader, "training")
    batches(config, dataset.val)
    return run


def check_rows(config: RunConfig, mesh: Mesh) -> None:
    parts = sharding.shard_count(mesh, sharding.RULES["batch"]) * config.accumulate
    if config.batch_size % parts:
        raise UserError(
            f"--batch-size {config.batch_size} cannot be dealt out to data x fsdp = "
            f"{parts // config.accumulate} devices in --accumulate {config.accumulate} pieces: "
            f"give a multiple of {parts}, or put devices on tensor, as --mesh tensor=2,... does."
        )


def execute(
    run: Run,
    folder: Path,
    observers: Sequence[Display | Tracker],
    show_setup: Callable[[TrainState, int], None],
    profile: int = 0,
) -> tuple[TrainState, int, int]:
    """Trains from the last checkpoint to the end or a stop.

    Calls `show_setup` with the initial state and its step. Of the steps from the third on `profile`
    are recorded by JAX's profiler. Returns the state, its step, and the signal that stopped the
    run, 0 at its end.
    """
    config, functions, rows = run.config, run.functions, sharding.of_batch(run.mesh)
    loader, rates = run.loader, optimizers.rates(config.optimizer)
    metadata = run_folder.metadata_of(folder, config)
    with contextlib.ExitStack() as stack:
        # First, so that Ctrl-C is a request while a save is waited for, too.
        requests = stack.enter_context(StopRequests())
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", metadata))
        state, step = init_state(run, checkpoints)
        run_folder.keep_steps(folder, config, run.dataset.key)
        show_setup(state, step)
        work = work_of(config, run.dataset.tokenizer.get_vocab_size(), run.mesh)
        recorder = stack.enter_context(Recorder(work, folder, observers, step))
        for observer in observers:
            observer.begin(step)
            stack.callback(observer.close)
        first, trace = step, stack.enter_context(contextlib.ExitStack())

        def save() -> None:
            checkpoints.save(step, state)
            recorder.saved = step

        while step < config.steps and not requests.stop(step):
            if profile and step in (first + 2, first + 2 + profile):
                jax.block_until_ready(state)
                trace.close()
                if step == first + 2:
                    trace.enter_context(jax.profiler.trace(folder / "profile"))
            # The devices may still compute the last step while this one's rows are read.
            asked = time.monotonic()
            batch = place_batch(loader, step, rows)
            waited = time.monotonic() - asked
            state, measured = functions.train_step(state, rates, *batch)
            step += 1
            # The devices compute this step while the figures of the one before it are written.
            recorder.add(step, measured, waited)
            is_evaluated = step % config.eval_every == 0 or step == config.steps
            is_saved = step % config.checkpoint_every == 0
            if is_evaluated or is_saved:
                recorder.pause()
            if is_evaluated:
                val = run.dataset.val
                recorder.record(step, evaluate(functions.loss, state.params, config, val, run.mesh))
            if is_saved:
                save()
        recorder.write()
        if step > recorder.saved:
            save()
        checkpoints.manager.wait_until_finished()
    return state, step, requests.signal if step < config.steps else 0


def init_state(run: Run, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The state that a run goes on from, and its step: saved, or new."""
    if saved := checkpoints.manager.latest_step():
        return checkpoints.restore(saved, run.functions.abstract), saved
    if not run.config.init_from:
        return run.functions.init(run.config.seed), 0
    from examples import weights  # which reads runs

    words, abstract = run.dataset.tokenizer.get_vocab_size(), run.functions.abstract.params
    params = weights.load_weights(Path(run.config.init_from), run.config.model, words)
    placed = jax.device_put(params, shardings_of(abstract))
    return run.functions.init_from(placed, run.config.seed), 0
