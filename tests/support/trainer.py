"""Toy runs of the trainer: their flags, their files, and ways to stop or disturb them."""

import dataclasses
import functools
import itertools
import math
import os
import time
import unittest.mock
from pathlib import Path

import jax
import jax.numpy as jnp

from examples.train import main
from examples.trainer.data.loader import place_batch
from examples.trainer.data.prepare import prepare
from examples.trainer.models import sharding
from examples.trainer.runs.loop import make_run
from examples.trainer.runs.metrics import Recorder
from examples.trainer.settings import command_line
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.files import read_json_lines
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_functions
from tests.support.imported import Started

ROOT = Path(__file__).parent.parent.parent
STEPS = 24
# One shape and one number of steps for all runs, so that each program is compiled once.
TOY = (
    "gpt-micro --model.n-layer 1 --model.d-model 16 --model.context 16 --data.vocab-size 300 "
    f"--steps {STEPS} --batch-size 8 --eval-every 10 --checkpoint-every 8 --eval-batches 2 "
    "--sample-tokens 20"
).split()
CUBE = "data=2,fsdp=2,tensor=2"
PATIENCE = 300  # seconds for what takes a few: what hangs fails, and a busy machine may be slow
ADAMW_RULE = OptimizerConfig(name="adamw")  # compiles faster, where the optimizer does not matter


def quiet(line):
    """Prints nothing."""


def on_devices(n):
    """A context in which JAX has only the first `n` devices."""
    return unittest.mock.patch.object(jax, "devices", return_value=jax.devices()[:n])


def train(text, root, *flags):
    """Trains the toy on a text; the exit status."""
    return main([*TOY, "--data.paths", str(text), "--runs-dir", str(root), *flags])


def run_shell(*flags, devices=1):
    """Starts a run as a process of its own."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    return Started("examples.train", flags, environment, ROOT)


# Readers of what a run has written


def losses(folder, kind="train_loss"):
    """Step to a measurement of a run."""
    return {r["step"]: r[kind] for r in read_json_lines(folder / "metrics.jsonl") if kind in r}


def saved_step(folder):
    """The step of the last complete checkpoint."""
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdecimal())  # others are being written


def wait_for(happened, *processes, seconds=PATIENCE):
    """Waits until something has happened; checks very often, since a save is short."""
    deadline = time.monotonic() + seconds
    while not happened():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Disturbances


def stop_at(step, action, kind="train_loss"):
    """A context in which `action` is called when a loss of a step has been written."""
    record = Recorder.record

    def record_and_stop(self, at, figures):
        record(self, at, figures)
        if at == step and kind in figures:
            action()

    return unittest.mock.patch.object(Recorder, "record", record_and_stop)


def crash():
    """An action for `stop_at`."""
    raise RuntimeError("power cut")


def losses_are(broken, loss=math.nan):
    """A context in which the losses of some steps, counted over all runs, are read as `loss`."""
    add, steps = Recorder.add, itertools.count(1)

    def add_broken(self, step, measured, waited):
        measured = measured._replace(loss=loss) if next(steps) in broken else measured
        add(self, step, measured, waited)

    return unittest.mock.patch.object(Recorder, "add", add_broken)


# The functions of a run, without its folder


def assemble_toy(text, mesh=CUBE, devices=8, **changes):
    """The setup of the toy, with some fields of its model and of its run changed."""
    config = _toy_config(text)
    run_changes = {k: v for k, v in changes.items() if hasattr(config, k)}
    model_changes = {k: v for k, v in changes.items() if k not in run_changes}
    model = dataclasses.replace(config.model, **model_changes)
    config = dataclasses.replace(config, model=model, **run_changes)
    placed = sharding.make_mesh(mesh, jax.devices()[:devices])
    return make_run(config, _prepared(config.data), placed, shared_functions)


def shared_functions(config, vocab_size, mesh):
    """The functions of a run: tests share them with all runs that differ in seed and rates only."""
    rule = dataclasses.replace(config.optimizer, learning_rate=None, adam_learning_rate=None)
    own = {name: getattr(config, name) for name in ("model", "steps", "accumulate")}
    return _functions(RunConfig(optimizer=rule, **own), vocab_size, mesh)


_functions = functools.lru_cache(maxsize=32)(make_functions)


@functools.cache
def _toy_config(text):
    return command_line.parse([*TOY, "--data.paths", str(text)])[0].config


@functools.cache
def _prepared(data):
    return prepare(data, quiet)


def first_losses(setup, steps=3):
    """The losses of the first steps."""
    functions, rates = setup.functions, optimizers.rates(setup.config.optimizer)
    state, found, rows = functions.init(setup.config.seed), [], sharding.of_batch(setup.mesh)
    for step in range(steps):
        state, measured = functions.train_step(state, rates, *place_batch(setup.loader, step, rows))
        found.append(float(measured.loss))
    return found


def compiled_step(setup, **options):
    """The compiled program of a step."""
    shape = (setup.loader.batch_size, setup.loader.context)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.of_batch(setup.mesh))
    return setup.functions.train_step.lower(
        setup.functions.abstract, optimizers.Rates(0.1, 0.1), rows, rows
    ).compile(compiler_options=options or None)
