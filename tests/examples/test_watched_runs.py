"""Checkpoints and evaluations by time, what ends a run that hangs, and steps that are left out."""

import math
import signal
import statistics
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.train import main
from examples.trainer.runs import processes, recorder
from examples.trainer.runs.metrics import RATES_AT_ONCE, LearningRates, read_metrics
from examples.trainer.runs.recorder import Due, Spikes, seconds_since_evaluation
from examples.trainer.runs.watchdog import Watchdog
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers, sharding, transformations
from tests.support.trainer import PATIENCE, ROOT, STEPS, TOY, saved_step, stop_at, train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; seconds."""
    now = [0.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    return now


# Checkpoints


def test_saves_are_asked_for_by_time_once(clock):
    saves = Due(every=100, minutes=15)
    asks = saves.asks
    assert not asks()
    clock[0] = 900
    assert asks() and not asks()  # until it is done
    saves.restart()
    assert not asks()
    clock[0] = 1799
    assert not asks()
    clock[0] = 1800
    assert asks()
    with unittest.mock.patch.object(recorder, "is_first", return_value=False):
        assert not Due(1, minutes=1e-9, gone=1).asks()
    assert not Due(1, minutes=0, gone=1).asks()


def test_a_run_saves_by_time_and_keeps_multiples_for_good(tmp_path, text):
    flags = ("--name", "x", "--checkpoint-minutes", "1e-9", "--keep-every", "7")
    assert train(text, tmp_path, *flags, "--checkpoint-every", "1000") == 0
    kept = {int(path.name) for path in (tmp_path / "x" / "checkpoints").iterdir()}
    assert kept == {7, 14, 21, STEPS - 1, STEPS}  # with the two newest, of every step


# Evaluations


def test_time_goes_on_from_the_last_evaluation_of_a_resumed_run(clock):
    seconds = "throughput/duration"
    records = [{"step": 1, seconds: 500}, {"step": 1, "val_loss": 2.0}, {"step": 2}]
    records += [{"step": step, seconds: 20} for step in (3, 4)]
    evaluations = Due(every=10, minutes=1, gone=seconds_since_evaluation(records))
    clock[0] = 19
    assert not evaluations.asks()
    clock[0] = 20  # 60 s of training after the evaluation, 40 of them before the stop
    assert evaluations.asks()
    assert not Due(every=10, minutes=1).asks()
    assert [step for step in range(1, 16) if evaluations.is_due(step, step == 4)] == [4, 10]


def test_a_run_evaluates_by_time_and_once_where_it_is_resumed(tmp_path, text):
    minutes = ("--eval-minutes", "1e-9", "--eval-every", "1000")
    with stop_at(11, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "x", *minutes) == 143
    assert main(["--resume", str(tmp_path / "x"), *minutes[:2]]) == 0
    records = read_metrics(tmp_path / "x" / "metrics.jsonl")
    for kind in ("train_loss", "val_loss"):
        found = [record["step"] for record in records if kind in record]
        assert found == list(range(1, STEPS + 1))


# Stopping


def test_sigterm_stops_after_the_step_that_runs_where_steps_are_slow(tmp_path, text, monkeypatch):
    def stopped(name):
        with stop_at(11, lambda: signal.raise_signal(signal.SIGTERM)):
            assert train(text, tmp_path, "--name", name) == 143
        return saved_step(tmp_path / name)

    assert stopped("quick") == 12  # one more was given to the devices already
    monkeypatch.setattr(recorder, "SLOW", 0)
    assert stopped("slow") == 11


def test_agreement_is_of_the_call_before_or_where_it_waits_of_this_one(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    agree = processes.agreement(sharding.make_mesh("", jax.devices()))
    assert agree((0, 1, 0), False) == (0, 0, 0)
    assert agree((0, 0, 0), False) == (0, 1, 0)
    assert agree((15, 0, 1), False) == (0, 0, 0)
    assert agree((0, 0, 1), True) == (15, 0, 1)  # what was not read yet is not lost
    assert agree((0, 1, 0), True) == (0, 1, 0)
    assert agree((2, 0, 0), False) == (0, 0, 0)  # and nothing is read twice
    assert agree((0, 0, 0), False) == (2, 0, 0)


# What hangs


def test_a_loop_that_hangs_ends_with_the_stacks_of_all_threads(tmp_path, text):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "x"]
    program = f"""
import sys, threading
from examples import train
from examples.trainer.runs import loop
place = loop.place_batch
def stuck_disk(loader, step, rows):
    return place(loader, step, rows) if step < 9 else threading.Event().wait()
loop.place_batch = stuck_disk
sys.exit(train.main({[*flags, "--watchdog-minutes", "0.05"]!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1, done.stderr
    assert "error: a step has not ended after" in done.stderr and "--resume" in done.stderr
    assert "stuck_disk" in done.stderr and "Current thread" in done.stderr  # of the other thread
    assert saved_step(tmp_path / "x") == 8
    assert main(["--resume", str(tmp_path / "x")]) == 0


def test_a_python_that_stands_still_is_ended_too():
    program = """
import ctypes
from examples.trainer.runs import watchdog
watchdog.SILENT = 1
with watchdog.Watchdog(0.02):
    watchdog.time.sleep(1)
    ctypes.PyDLL(None).sleep(600)  # in C, without letting other threads run
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "Timeout" in done.stderr and "<module>" in done.stderr


def test_a_phase_may_take_ten_medians_and_at_least_the_given_time(clock):
    watchdog = Watchdog(minutes=5)
    watchdog.began("step")
    assert watchdog.limit() == 6 * 300  # the first step, which compiles
    for seconds in (100, 50, 70):
        clock[0] += seconds
        watchdog.began("step")
    assert watchdog.limit() == 700
    watchdog.began("save")
    assert watchdog.limit() == 6 * 300
    clock[0] += 2
    watchdog.began("save")
    assert watchdog.limit() == 300


# Spikes


def test_a_gradient_above_the_bound_changes_nothing():
    inner = optax.adam(0.1)
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    grads = {"a": jnp.asarray([0.0, 3.0, 0.0]), "b": jnp.asarray([4.0, 0.0])}  # of norm 5
    state = inner.init(params)
    expected = inner.update(grads, state, params)
    for bound in (5.0, math.inf):
        found = transformations.leave_out_above(bound, inner).update(grads, state, params)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    found = transformations.leave_out_above(4.999, inner).update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, found, (jax.tree.map(jnp.zeros_like, grads), state))


def test_the_bound_is_that_of_the_norms_before():
    norms = np.random.default_rng(0).uniform(1, 2, 300)
    found = Spikes(6.0, [])
    assert found.bound(1) == math.inf and Spikes(None, []).bound(1) is None
    for step, norm in enumerate(norms, 1):
        past = norms[: max(0, step - 2)][-128:]
        enough = len(past) >= 64
        expected = past.mean() + 6 * past.std(ddof=1) if enough else math.inf
        assert found.bound(step) == pytest.approx(expected, rel=1e-12)
        found.add(step, float(norm))


def test_spikes_are_left_out_and_a_resumed_run_leaves_out_the_same(tmp_path, text, monkeypatch):
    monkeypatch.setattr(recorder, "WINDOW", 6)
    flags = ("--skip-spikes", "0.5")
    assert train(text, tmp_path, "--name", "whole", *flags) == 0
    records = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "val_loss" not in r]
    norms = [record["grad/norm/total"] for record in records]
    assert len(norms) == STEPS
    left = []
    for step in range(1, STEPS + 1):
        past = norms[: max(0, step - 2)][-6:]
        if len(past) >= 3 and norms[step - 1] > statistics.fmean(past) + 0.5 * statistics.stdev(
            past
        ):
            left.append(step)
    assert left == [record["step"] for record in records if "skipped_above" in record]
    assert 0 < len(left) < STEPS / 2
    rates = [record["optim/learning_rate"] for record in records if "train_loss" in record]
    whole = LearningRates(OptimizerConfig(), STEPS)
    assert rates == [whole.of(i)["optim/learning_rate"] for i in range(len(rates))]

    with stop_at(13, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "x", *flags) == 143
    assert main(["--resume", str(tmp_path / "x")]) == 0
    again = [r for r in read_metrics(tmp_path / "x" / "metrics.jsonl") if "val_loss" not in r]
    same = ("step", "train_loss", "grad/norm/total", "skipped_above", "optim/learning_rate")
    assert [[r.get(k) for k in same] for r in again] == [[r.get(k) for k in same] for r in records]


# Rates


@pytest.mark.parametrize("schedule", ["constant_linear", "warmup_cosine"])
def test_rates_in_blocks_are_those_of_the_schedule(schedule):
    config, steps = OptimizerConfig(schedule=schedule), 3 * RATES_AT_ONCE + 5
    found = LearningRates(config, steps)
    peaks = optimizers.rates(config)
    for update in (0, 1, RATES_AT_ONCE - 1, RATES_AT_ONCE, 2 * RATES_AT_ONCE + 7, steps - 1, 3):
        rate = float(optimizers.schedule(config, peaks.matrices, steps)(update))
        assert found.of(update)["optim/learning_rate"] == pytest.approx(rate, rel=1e-5, abs=1e-8)
    assert found.block.shape == (2, RATES_AT_ONCE)


def test_rates_of_the_longest_run_take_no_more_memory():
    found = LearningRates(OptimizerConfig(), 2**31 - 1)
    assert found.of(2**31 - 2)["optim/learning_rate"] >= 0
    assert found.block.size == 2 * RATES_AT_ONCE
