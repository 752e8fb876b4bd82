"""Runs that are stopped or crash, and go on: the same losses."""

import signal
import subprocess
import sys

import pytest

from examples.train import main
from examples.trainer.runs.processes import StopRequests
from examples.trainer.system.files import read_json_lines
from tests.support.trainer import (
    PATIENCE,
    ROOT,
    STEPS,
    crash,
    losses,
    saved_step,
    stop_at,
    train,
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


def test_crash_then_resume_gives_the_same_losses(tmp_path, text, trained_run):
    with stop_at(13, crash), pytest.raises(RuntimeError, match="power cut"):
        train(text, tmp_path, "--name", "x")
    path = tmp_path / "x" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 14, "train_l')  # the line that was being written
    assert main(["--resume", str(tmp_path / "x")]) == 0
    records = read_json_lines(path)
    assert [r["step"] for r in records if "train_loss" in r] == list(range(1, STEPS + 1))
    for kind in ("train_loss", "grad/norm/total", "optim/learning_rate"):
        assert losses(tmp_path / "x", kind) == losses(trained_run, kind)


def test_signals_become_requests_and_a_second_ctrl_c_interrupts():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequests() as requests:
        assert not requests.stop(0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # schedulers send it again
        assert requests.stop(1) and requests.signal == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_ctrl_c_in_the_first_seconds_ends_with_a_sentence():
    program = """
import sys, importlib.abc
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("tyro", "jax", "pydantic"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from examples import train
sys.exit(train.main([]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 130 and "stopped before the run began" in done.stdout
    assert "Traceback" not in done.stderr
