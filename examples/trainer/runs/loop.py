"""Trains a run in its folder: steps, evaluations, checkpoints, and requests to stop."""

import contextlib
import ctypes
import dataclasses
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax
import optax
from jax.sharding import Mesh

from examples.trainer.data.loader import Loader, check_enough, place_batch
from examples.trainer.data.token_files import Dataset
from examples.trainer.models import sharding
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.runs.metrics import Observers, Recorder, work_of
from examples.trainer.runs.processes import StopRequests
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from examples.trainer.training.step import Functions, TrainState

# glibc gives large arrays back to the system when they are free, so that every step on a CPU asks
# for its memory again, and the system fills that with zeros: a third of the time of a small model.
# Up to 512 MB stay with the process instead. The numbers are those of malloc.h.
for variable, option in (("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1)):
    if variable not in os.environ:
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(option, 2**29)


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
        config = self.config
        return Loader(self.dataset.train.ids, config.model.context, config.batch_size, config.seed)

    @property
    def val_loader(self) -> Loader:
        """The batches of evaluations, always the same, and as large as micro-batches."""
        size = self.config.batch_size // self.config.accumulate
        return Loader(self.dataset.val.ids, self.config.model.context, size, seed=0, once=True)


def make_run(
    config: RunConfig,
    dataset: Dataset,
    mesh: Mesh,
    make: Callable[[RunConfig, int, Mesh], Functions],
) -> Run:
    """A run, whose functions `make` makes; refuses too little text, and rows that do not divide."""
    check_rows(config, mesh)
    run = Run(config, mesh, dataset, make(config, dataset.tokenizer.get_vocab_size(), mesh))
    check_enough(run.loader, "training")
    check_enough(dataclasses.replace(run.val_loader, batch_size=1), "validation")
    return run


def check_rows(config: RunConfig, mesh: Mesh) -> None:
    parts = sharding.shard_count(mesh, sharding.BATCH) * config.accumulate
    if config.batch_size % parts:
        raise UserError(
            f"--batch-size {config.batch_size} cannot be dealt out to data x fsdp = "
            f"{parts // config.accumulate} devices in --accumulate {config.accumulate} pieces: "
            f"give a multiple of {parts}, or put devices on tensor, as --mesh tensor=2,... does."
        )


def execute(
    run: Run, folder: Path, observers: Observers, profile: int = 0
) -> tuple[TrainState, int, int]:
    """Trains from the last checkpoint to the end or a stop.

    Of the steps from the third on `profile` are recorded by JAX's profiler. Returns the state, its
    step, and the signal that stopped the run, 0 at its end.
    """
    config, metadata = run.config, run_folder.metadata_of(folder, run.config)
    # Requests come first, so that Ctrl-C is one while a save is waited for, too.
    with StopRequests() as requests, Checkpoints(folder / "checkpoints", metadata) as checkpoints:
        state, first = init_state(run, checkpoints)
        run_folder.keep_steps(folder, config, run.dataset.key)
        work, step = work_of(config, run.dataset.tokenizer.get_vocab_size(), run.mesh), first
        with Recorder(work, folder, observers, step) as recorder, ExitStack() as trace:
            while step < config.steps and not requests.stop(step):
                if profile and step in (first + 2, first + 2 + profile):
                    jax.block_until_ready(state)
                    trace.close()
                    if step == first + 2:
                        trace.enter_context(jax.profiler.trace(folder / "profile"))
                state = take_step(run, state, step, recorder)
                step += 1
                if step % config.eval_every == 0 or step == config.steps:
                    recorder.pause()
                    recorder.record(step, evaluate(run, state.params))
                if step % config.checkpoint_every == 0:
                    recorder.pause()
                    checkpoints.save(step, state)
                    recorder.saved = step
            recorder.write()
            if step > recorder.saved:
                checkpoints.save(step, state)
    return state, step, requests.signal if step < config.steps else 0


def take_step(run: Run, state: TrainState, step: int, recorder: Recorder) -> TrainState:
    """The state after one more step than `step`."""
    # The devices may still compute the last step while this one's rows are read.
    asked = time.monotonic()
    batch = place_batch(run.loader, step, sharding.of_batch(run.mesh))
    waited = time.monotonic() - asked
    state, measured = run.functions.train_step(
        state, optimizers.rates(run.config.optimizer), *batch
    )
    # The devices compute this step while the figures of the one before it are written.
    recorder.add(step + 1, measured, waited)
    return state


def evaluate(run: Run, params: optax.Params) -> dict[str, float]:
    """Loss and perplexity of validation text; bits per byte compare between tokenizers."""
    config, loader, val = run.config, run.val_loader, run.dataset.val
    # A part of the last batch counts as such: rows that fill it up have no targets.
    full = min(config.eval_batches * config.accumulate, loader.n_windows / loader.batch_size)
    rows = sharding.of_batch(run.mesh)
    batches = (place_batch(loader, i, rows) for i in range(math.ceil(full)))
    losses = [run.functions.loss(params, *batch) for batch in batches]
    loss = math.fsum(map(float, losses)) / full
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)),  # the exponential of 710 overflows
        "val_bits_per_byte": loss / math.log(2) * len(val.ids) / val.bytes,
    }


def init_state(run: Run, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The state that a run goes on from, and its step: saved, or new."""
    if saved := checkpoints.manager.latest_step():
        return checkpoints.restore(saved, run.functions.abstract), saved
    if not run.config.init_from:
        return run.functions.init(run.config.seed), 0
    from examples import weights  # which reads runs

    words, seed = run.dataset.tokenizer.get_vocab_size(), run.config.seed
    params = weights.load_weights(Path(run.config.init_from), run.config.model, words)
    return run.functions.init(seed, jax.device_put(params, sharding.of_params(params, run.mesh))), 0
