"""Run folders from elsewhere: what they say is checked, and what they name stays safe."""

import json
import os
import shutil

import pytest

from examples import generate
from examples.train import main
from tests.support.trainer import STEPS, losses, train

pytestmark = pytest.mark.usefixtures("one_device")
LAST = str(STEPS)


@pytest.fixture
def copy(trained_run, tmp_path):
    """A copy of a finished run, which resumes, is measured and is sampled."""
    return shutil.copytree(trained_run, tmp_path / "x")


def said(capsys, *command):
    """What is said of a folder that is refused."""
    run = {"resume": main, "sample": generate.main}[command[0]]
    arguments = ["--resume", *command[1:]] if command[0] == "resume" else [*command[1:]]
    assert run(list(map(str, arguments))) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error") and "Traceback" not in shown
    return shown


# A run folder is one object


def test_the_state_of_another_run_or_step_is_refused(copy, tmp_path, text, capsys):
    assert train(text, tmp_path, "--name", "other", "--seed", "5") == 0
    state = copy / "checkpoints" / LAST / "state"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "other" / "checkpoints" / LAST / "state", state)
    for command in ("resume", "sample"):
        assert "24 is damaged: " in said(capsys, command, copy)
    shutil.rmtree(state)
    shutil.copytree(copy / "checkpoints" / "16" / "state", state)
    assert "24 is damaged: " in said(capsys, "sample", copy)
    shutil.rmtree(state.parent)
    assert main(["--resume", str(copy)]) == 0  # from the checkpoint before it
    assert list(losses(copy)) == list(range(1, STEPS + 1))


def test_a_changed_tokenizer_is_refused_by_all(copy, text, capsys):
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(content))
    for command in (("resume", copy), ("sample", copy)):
        assert "tokenizer_sha256 was" in said(capsys, *command)


def test_a_changed_configuration_is_refused_by_all(copy, text, capsys):
    path = copy / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["n_head"] = 1
    path.write_text(json.dumps(content))
    for command in (("resume", copy), ("sample", copy)):
        assert "model.n_head was 2, and is 1" in said(capsys, *command)


# Links, pipes and devices


@pytest.mark.parametrize("name", ["wandb/run-1", "checkpoints"])
def test_no_folder_of_a_run_is_a_link_out_of_it(copy, tmp_path, name, capsys):
    (tmp_path / "mine").mkdir()
    (copy / name).parent.mkdir(exist_ok=True)
    shutil.rmtree(copy / "checkpoints" / LAST)
    shutil.rmtree(copy / name, ignore_errors=True)
    (copy / name).symlink_to(tmp_path / "mine")
    assert f"{copy / name} is a link, a pipe" in said(capsys, "resume", copy)
    assert not list((tmp_path / "mine").iterdir())


def test_links_inside_a_run_are_followed(copy):
    (copy / "wandb" / "run-1").mkdir(parents=True)
    (copy / "wandb" / "latest-run").symlink_to("run-1")  # as wandb makes it
    assert main(["--resume", str(copy)]) == 0


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_files_that_are_links_are_not_followed(copy, tmp_path, name, capsys):
    mine = tmp_path / "mine"
    mine.write_text("")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(mine)
    shutil.rmtree(copy / "checkpoints" / LAST)  # so that there are steps to write
    assert f"{copy / name} is a link, a pipe or a device" in said(capsys, "resume", copy)
    assert mine.read_text() == ""


def test_foreign_folders_with_numbers_are_not_deleted(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / LAST)
    for number in ("1", "2", "3"):
        (copy / "checkpoints" / number).mkdir()
        (copy / "checkpoints" / number / "letter.txt").write_text("dear")
    assert "is no checkpoint of this trainer" in said(capsys, "resume", copy)
    assert (copy / "checkpoints" / "1" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "metrics.jsonl"])
def test_pipes_and_devices_do_not_hang(copy, name, capsys):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert str(copy / name) in said(capsys, "resume", copy)
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    assert str(copy / name) in said(capsys, "resume", copy)
