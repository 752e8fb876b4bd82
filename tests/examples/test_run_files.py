"""The files of a run: its folder, its lock, its figures and its settings."""

import json
import shutil
import subprocess
import sys
import unittest.mock

import pytest

from examples.train import main
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.folder import only_writer
from examples.trainer.runs.metrics import Metrics, read_metrics
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
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
        folder = run_folder.choose_folder(config, "p")
        assert folder == tmp_path / name
        run_folder.create(folder, config, dataset)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "config.json"}
    with pytest.raises(UserError, match="exists: choose another --name"):
        run_folder.choose_folder(RunConfig(runs_dir=str(tmp_path), name="p-muonplus"), "p")
    with (
        unittest.mock.patch.object(run_folder, "is_first", return_value=False),
        pytest.raises(UserError, match="on a disk that all processes share"),
    ):
        run_folder.create(tmp_path / "y", config, dataset)


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
    metrics = Metrics(path, 5)
    metrics.add(2, train_loss=1.0)
    metrics.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


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


@pytest.mark.parametrize("content", ["", "[]", '{"config": {}}'])
def test_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}/config.json was not written by this version"):
        run_folder.read_config(tmp_path)
