"""What a run says and leaves on a full, broken or read-only disk, and when it is interrupted."""

import contextlib
import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from examples.train import main
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import integrity
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from tests.support.trainer import ROOT, STEPS, losses, saved_step, stop_at, train

pytestmark = pytest.mark.usefixtures("one_device")
FULL = OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def failing_at(name, error=FULL):
    """A context in which files of that name cannot be opened for writing."""
    opened, os_opened = Path.open, os.open

    def refuse(path, writes):
        if Path(path).name.startswith(name) and writes:
            raise OSError(error.errno, error.strerror, str(path))

    def open_or_fail(self, mode="r", *args, **named):
        refuse(self, set(mode) & set("wax+"))
        return opened(self, mode, *args, **named)

    def os_open_or_fail(path, flags, *args, **named):  # the lock's
        refuse(path, flags & (os.O_WRONLY | os.O_RDWR))
        return os_opened(path, flags, *args, **named)

    with (
        unittest.mock.patch.object(Path, "open", open_or_fail),
        unittest.mock.patch.object(os, "open", os_open_or_fail),
    ):
        yield


def test_new_run_on_a_full_disk_leaves_nothing(tmp_path):
    dataset = unittest.mock.Mock(key="k")
    dataset.tokenizer.to_str.return_value = "{}"
    for name in ("tokenizer.json", "config.json"):
        with failing_at(name), pytest.raises(UserError, match=r"No space left.*make room"):
            run_folder.create(tmp_path / "x", RunConfig(), dataset)
        assert not list(tmp_path.iterdir())
    run_folder.create(tmp_path / "x", RunConfig(), dataset)
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"tokenizer.json", "config.json"}
    with pytest.raises(UserError, match="exists: choose another --name"):
        run_folder.create(tmp_path / "x", RunConfig(), dataset)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_name_that_is_too_long_is_refused(tmp_path):
    config = RunConfig(runs_dir=str(tmp_path), name="x" * 300)
    with pytest.raises(UserError, match=r"File name too long.*shorter name(.|\n)*--name"):
        run_folder.choose_folder(config, "p")


@pytest.mark.parametrize(
    ("name", "number"),
    [("lock", errno.EROFS), ("metrics.jsonl", errno.ENOSPC), ("losses.png", errno.ENOSPC)],
)
def test_file_that_cannot_be_written_is_named(trained_run, tmp_path, capsys, name, number):
    copy = shutil.copytree(trained_run, tmp_path / "x")
    with failing_at(name, OSError(number, os.strerror(number))):
        assert main(["--resume", str(copy)]) == 2
    shown = capsys.readouterr().err
    assert f"{copy}/{name}: " in shown and os.strerror(number) in shown
    assert files.REMEDIES[number] in shown and f"--resume {copy}" in shown


def test_run_folder_that_is_removed_is_named(text, tmp_path, capsys):
    folder = tmp_path / "x"
    with stop_at(9, lambda: shutil.rmtree(folder, ignore_errors=True)):
        assert train(text, tmp_path, "--name", "x") == 2
    shown = capsys.readouterr().err  # the second, if a save was under way
    assert f"{folder}/checkpoints is gone" in shown or f"cannot save to {folder}" in shown
    assert "Traceback" not in shown


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


def test_leaving_after_a_stop_does_not_wait_for_threads():
    code = (
        "import threading, time; from examples.trainer.system.exit_status import leave;"
        "threading.Thread(target=time.sleep, args=(600,)).start(); print('said'); leave(130)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (130, "said\n")


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
