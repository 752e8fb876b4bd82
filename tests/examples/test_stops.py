"""Runs that are stopped, crash, hang or diverge, and go on: the same losses."""

import signal

import jax
import pytest

from examples.train import main
from examples.trainer.runs import processes, recorder
from examples.trainer.runs.metrics import read_metrics
from examples.trainer.training import sharding
from tests.support.trainer import (
    PATIENCE,
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


# Steps that are not finite


# Spikes
