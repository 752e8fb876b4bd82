"""The files of a run: its folder, its lock, its figures and its settings."""

import json
import os
import shutil
import subprocess
import sys
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.train import main
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.folder import only_writer
from examples.trainer.runs.metrics import Recorder
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError, run_command
from examples.trainer.system.files import read_json_lines
from tests.support.trainer import wait_for

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def copy(trained_run, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(trained_run, tmp_path / "x")


def said_when_resumed(folder, capsys):
    assert main(["--resume", str(folder)]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


def test_a_name_is_used_once_and_a_default_name_gets_a_number(tmp_path):
    dataset = unittest.mock.Mock(key="k")
    dataset.tokenizer.to_str.return_value = "{}"
    config = RunConfig(runs_dir=str(tmp_path))
    for name in ("p-muonplus", "p-muonplus-2"):
        folder = run_folder.create(config, "p", dataset)
        assert folder == tmp_path / name
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "config.json"}
    with pytest.raises(UserError, match="exists: choose another --name"):
        run_folder.names(RunConfig(runs_dir=str(tmp_path), name="p-muonplus"), "p")
    with pytest.raises(UserError, match="on a disk that all processes share"):
        run_folder.check_shared(tmp_path / "y")


def test_runs_that_begin_at_the_same_moment_get_folders_of_their_own(tmp_path):
    dataset = unittest.mock.Mock(key="k")
    dataset.tokenizer.to_str.return_value = "{}"
    config = RunConfig(runs_dir=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: run_folder.create(config, "p", dataset), range(8))
    assert len(set(found)) == 8


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x"])
def test_a_name_stays_in_the_folder_of_runs(tmp_path, name):
    with pytest.raises(UserError, match=r"is no place in .*--runs-dir"):
        run_folder.names(RunConfig(runs_dir=str(tmp_path), name=name), "p")


def test_run_that_another_process_writes_is_refused(copy, capsys):
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX)"
        "; file.write('x'); file.flush(); time.sleep(99)"
    )
    lock = copy / "lock"
    lock.unlink(missing_ok=True)
    holder = subprocess.Popen([sys.executable, "-c", hold, str(lock)])
    try:
        wait_for(lambda: lock.exists() and lock.stat().st_size, holder)
        assert f"{copy} is being written by another process" in said_when_resumed(copy, capsys)
    finally:
        holder.kill()
        holder.wait()
    with only_writer(copy):  # the lock has died with its process
        pass


@pytest.mark.parametrize("end", [bytes(512), b'{"step": 17, "tr', b'{"step": 3' + bytes(9)])
def test_end_that_a_power_cut_leaves_is_left_out(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train_loss": NaN}\n\n' + end)  # an empty line means nothing
    with Recorder({}, tmp_path, [], 5) as recorder:
        recorder.record(2, {"train_loss": 1.0})
    assert [record["step"] for record in read_json_lines(path)] == [1, 2]


def test_last_loss_that_is_not_finite_is_an_error(copy, capsys):
    path = copy / "metrics.jsonl"
    *lines, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert "val_loss" in last
    written = [*lines, {**last, "val_loss": float("nan")}]
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    shown = said_when_resumed(copy, capsys)
    assert "last validation loss is nan" in shown and "--optimizer.learning-rate" in shown


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        (None, "steps", "3", "steps is '3': it should be a valid integer"),
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is cut or damaged"),
        ('{"config": {"steps"', "is cut or damaged"),
        ("[]", "was not written by this version"),
        ('{"config": {}}', "was not written by this version"),
    ],
)
def test_damaged_config_is_named(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}/config.json {words}"):
        run_folder.read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_does_not_hang(copy, capsys, name, kind):
    (copy / name).unlink()
    os.mkfifo(copy / name) if kind == "pipe" else (copy / name).symlink_to("/dev/zero")
    assert f"{name} is no regular file" in said_when_resumed(copy, capsys)


def test_damaged_figures_are_named(copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], '{"step": 5, "tra\n', *lines[5:]]))
    assert "metrics.jsonl, line 5 is cut or damaged" in said_when_resumed(copy, capsys)
    path.unlink()
    assert "metrics.jsonl lacks the figures of the run" in said_when_resumed(copy, capsys)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), "--accumulate"),
        (RuntimeError("INTERNAL: Error: Out of memory allocating 9 bytes."), "--batch-size"),
        (MemoryError(), "--batch-size"),
        (ValueError("writing failed: [Errno 28] No space left on device"), "the disk is full"),
    ],
)
def test_errors_of_the_machine_are_sentences(error, words, capsys):
    assert run_command(unittest.mock.Mock(side_effect=error)) == 2
    assert words in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="another"):
        run_command(unittest.mock.Mock(side_effect=RuntimeError("another")))
