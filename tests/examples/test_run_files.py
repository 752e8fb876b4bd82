"""What is said of the files of a run that are damaged, in use, or cannot be written."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest

from examples.experiments.sweeps.ledger import Result
from examples.train import main
from examples.trainer.runs import folder, launch
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.folder import only_writer
from examples.trainer.runs.metrics import Metrics, read_metrics
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError
from tests.support.trainer import wait_for

pytestmark = pytest.mark.usefixtures("one_device")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def copy(trained_run, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(trained_run, tmp_path / "x")


def said_when_resumed(folder, capsys):
    assert main(["--resume", str(folder)]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


# Full and read-only disks


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
    with (
        unittest.mock.patch.object(run_folder, "is_first", return_value=False),
        pytest.raises(UserError, match="on a disk that all processes share"),
    ):
        run_folder.create(tmp_path / "y", RunConfig(), dataset)


def test_a_default_name_that_another_run_takes_meanwhile_becomes_the_next_one(tmp_path):
    setup = unittest.mock.Mock(config=RunConfig(runs_dir=str(tmp_path)))
    setup.dataset.key = setup.dataset.tokenizer.to_str.return_value = "{}"
    first = run_folder.choose_folder(setup.config, "p")
    made = [launch.make_folder(first, setup, "p") for _ in range(2)]
    assert made == [tmp_path / "p-muonplus", tmp_path / "p-muonplus-2"]
    setup.config = RunConfig(runs_dir=str(tmp_path), name="p-muonplus")
    with pytest.raises(UserError, match="exists: choose another --name"):
        launch.make_folder(first, setup, "p")


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


# What Orbax leaves of a save whose folder is gone, Python's collector reports at some later time.


# The lock


def test_run_that_another_process_writes_is_refused(copy, capsys):
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX)"
        "; file.write('process 12 on host h'); file.flush(); time.sleep(99)"
    )
    lock = copy / folder.LOCK
    lock.unlink(missing_ok=True)
    holder = subprocess.Popen([sys.executable, "-c", hold, str(lock)])
    try:
        wait_for(lambda: lock.exists() and lock.stat().st_size, holder)
        shown = said_when_resumed(copy, capsys)
        assert f"{copy} is being written by process 12 on host h" in shown
    finally:
        holder.kill()
        holder.wait()
    with only_writer(copy, print):  # the lock has died with its process
        assert f"process {os.getpid()} on host" in lock.read_text()
        with pytest.raises(UserError, match=f"written by process {os.getpid()} on host"):
            only_writer(copy, print).__enter__()


def test_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said = []
    with only_writer(tmp_path, said.append):
        pass
    assert len(said) == 1 and "file system without locks" in said[0]


# Measurements


@pytest.mark.parametrize("end", [bytes(512), b'{"step": 17, "tr', b'{"step": 3' + bytes(9)])
def test_end_that_a_power_cut_leaves_is_left_out_and_said(tmp_path, end):
    path, said = tmp_path / "metrics.jsonl", []
    line = b'{"step": 1, "train_loss": NaN}\n'
    path.write_bytes(line + b"\n" + end)  # an empty line means nothing
    with Metrics(path, 5, said.append) as metrics:
        metrics.add(2, train_loss=1.0)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert len(said) == 1 and f"{path}: its last {len(end)} bytes" in said[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"step": 2, \x07}', "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"[1]", r"line 2 is \[1\], and not a JSON object"),
        (b'{"loss": 1}', "line 2 is a record without a step"),
        (b'{"step": 2, "train_loss": "1"}', "line 2 is a record with no number as train_loss"),
    ],
)
def test_damaged_line_of_metrics_is_named(tmp_path, line, words):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"{path}.*{words}.*Remove that line"):
        Metrics(path, 5)


def test_last_loss_that_is_not_finite_is_an_error(copy, capsys):
    path = copy / "metrics.jsonl"
    *lines, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert "val_loss" in last
    written = [*lines, {**last, "val_loss": float("nan")}]
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    shown = said_when_resumed(copy, capsys)
    assert "last validation loss is nan" in shown and "--optimizer.learning-rate" in shown
    assert Result([(1, float("nan"))], None, None, 1.0).loss == float("inf")
    path.write_text("")
    assert f"{path} has no losses" in said_when_resumed(copy, capsys)


# Configurations


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        (None, "steps", "3", "steps is '3': it should be a valid integer"),
        (None, "batch_size", True, "batch_size is True: it should be a valid integer"),
        (None, "data", [1], r"data is \[1\]: it should be an object"),
        ("data", "paths", "a", "data.paths is 'a': it should be a valid array"),
        ("optimizer", "name", "sgd", "optimizer.name is 'sgd': it should be 'muonplus'"),
        ("optimizer", "nesterov", 1, "optimizer.nesterov is 1: it should be a valid boolean"),
        ("optimizer", "colour", 1, "optimizer.colour is 1: there is no such setting"),
    ],
)
def test_setting_of_another_type_is_named(copy, section, key, value, words):
    path = copy / "config.json"
    written = json.loads(path.read_text())
    (written["config"][section] if section else written["config"])[key] = value
    path.write_text(json.dumps(written))
    with pytest.raises(UserError, match=f"{path} was not written by this version: .*{words}"):
        run_folder.read_config(copy)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"data": "a"}', '{"config": {}}'])
def test_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}/config.json was not written by this version"):
        run_folder.read_config(tmp_path)


# What a checkpoint minds of its settings
