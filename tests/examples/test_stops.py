"""Runs that are stopped, crash, hang or diverge, and go on: the same losses."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import orbax.checkpoint as ocp
import pytest

from examples.train import main
from examples.trainer.runs import integrity, processes, recorder
from examples.trainer.runs.metrics import read_metrics
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from tests.support.trainer import (
    PATIENCE,
    ROOT,
    STEPS,
    TOY,
    crash,
    losses,
    run_shell,
    saved_step,
    stop_at,
    train,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("one_device")


def test_ctrl_c_then_resume_gives_the_same_losses(tmp_path, text, trained_run, capsys):
    with stop_at(11, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(text, tmp_path, "--name", "a b") == 130
    folder = tmp_path / "a b"
    shown = capsys.readouterr().out
    assert f"python -m examples.train --resume '{folder}'" in shown
    stopped_after = max(losses(folder))
    assert 11 <= stopped_after <= 12  # the step under way is finished
    assert f"stopped after step {stopped_after}" in shown
    assert saved_step(folder) == stopped_after
    assert main(["--resume", str(folder)]) == 0
    assert losses(folder) == losses(trained_run)
    assert losses(folder, "val_loss") == losses(trained_run, "val_loss")
    assert (folder / "sample.txt").read_text() == (trained_run / "sample.txt").read_text()


def test_ctrl_c_during_an_evaluation_saves_that_step(tmp_path, text):
    with stop_at(10, lambda: signal.raise_signal(signal.SIGINT), kind="val_loss"):
        assert train(text, tmp_path, "--name", "x") == 130
    assert saved_step(tmp_path / "x") == 10  # though a checkpoint was not due


def test_crash_then_resume_gives_the_same_losses(tmp_path, text, trained_run):
    with stop_at(13, crash), pytest.raises(RuntimeError, match="power cut"):
        train(text, tmp_path, "--name", "x")
    path = tmp_path / "x" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 14, "train_l')  # the line that was being written
    assert main(["--resume", str(tmp_path / "x")]) == 0
    records = read_metrics(path)
    assert [r["step"] for r in records if "train_loss" in r] == list(range(1, STEPS + 1))
    for kind in ("train_loss", "grad/norm/total", "optim/learning_rate"):
        assert losses(tmp_path / "x", kind) == losses(trained_run, kind)


def test_crash_before_the_first_checkpoint_then_resume(tmp_path, text, trained_run):
    with stop_at(3, crash), pytest.raises(RuntimeError):
        train(text, tmp_path, "--name", "x")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x") == losses(trained_run)


def test_ctrl_c_in_a_shell_exits_with_130_and_says_how_to_resume(tmp_path, text):
    # So many steps that the run is not over before the signal arrives.
    flags = [*TOY, "--steps", "100000", "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    process = run_shell(*flags, "--name", "x")
    metrics = tmp_path / "x" / "metrics.jsonl"
    wait_for(metrics.exists, process)  # the first step comes next
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"python -m examples.train --resume {tmp_path / 'x'}" in shown
    assert "Traceback" not in shown


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


# A second Ctrl-C


def wait_until_unchanged(folder):
    seen = None
    while (now := sorted(folder.rglob("*"))) != seen:
        seen = now
        time.sleep(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_second_ctrl_c_ends_a_run_at_once_and_it_resumes(text, tmp_path, capsys):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with stop_at(11, twice):
        assert train(text, tmp_path, "--name", "x") == 130
    shown = capsys.readouterr().out
    assert "ended at once" in shown and f"--resume {tmp_path}/x" in shown
    # With its process a save that was under way ends; here its threads live on.
    wait_until_unchanged(tmp_path / "x")
    gc.collect()
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert list(losses(tmp_path / "x")) == list(range(1, STEPS + 1))


def test_second_ctrl_c_does_not_wait_for_the_save_at_the_end(text, tmp_path, monkeypatch):
    def never_ends(path):
        started.set()
        ended.wait()
        return 0, ""

    def press_twice():
        started.wait()
        if returned.is_set():
            return
        limit.start()
        before = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) == before:  # else both would become one signal
            if returned.wait(0.01):
                return  # not into another test
        # As a finger would: Python may miss a signal between its handler and the wait that follows.
        if not returned.wait(0.5):
            os.kill(os.getpid(), signal.SIGINT)

    started, ended, returned = (threading.Event() for _ in range(3))
    monkeypatch.setattr(integrity, "checksum", never_ends)
    limit = threading.Timer(30, ended.set)  # so that the test fails, and does not hang
    finger = threading.Thread(target=press_twice)
    finger.start()
    try:
        assert train(text, tmp_path, "--name", "x", "--checkpoint-every", "1000") == 130
        assert not ended.is_set(), "it waited for the save"
    finally:
        returned.set()
        started.set()
        ended.set()
        limit.cancel()
        finger.join()


def test_ctrl_c_after_an_error_waits_for_the_save_under_way(text, tmp_path, monkeypatch, capsys):
    closing, pressed = threading.Event(), threading.Event()
    checksum, close = integrity.checksum, ocp.CheckpointManager.close

    def slow(path):
        pressed.wait(30)
        return checksum(path)

    def close_late(manager):
        closing.set()
        close(manager)

    def press():
        closing.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        pressed.set()

    def fail():
        raise UserError("something else.")

    monkeypatch.setattr(integrity, "checksum", slow)
    monkeypatch.setattr(ocp.CheckpointManager, "close", close_late)
    finger = threading.Thread(target=press)
    finger.start()
    with stop_at(9, fail):
        assert train(text, tmp_path, "--name", "x") == 2
    finger.join()
    assert "something else" in capsys.readouterr().err
    assert saved_step(tmp_path / "x") == 8


def test_leaving_after_a_stop_does_not_wait_for_threads():
    code = (
        "import threading, time; from examples.trainer.system.exit_status import leave;"
        "threading.Thread(target=time.sleep, args=(600,)).start(); print('said'); leave(130)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (130, "said\n")


# Steps that are not finite


# Spikes
