"""Runs that are extended, branched, or of earlier versions: their losses, rates and sentences."""

import json
import shutil
import signal

import pytest

from examples.train import main
from examples.trainer.runs import folder
from tests.support.trainer import losses, saved_step, stop_at, train

pytestmark = pytest.mark.usefixtures("one_device")

MORE = 32


# A rule that is traced in a moment, since each number of steps has a program of its own.
RULE = ("--optimizer.name", "adamw", "--optimizer.learning-rate", "0.02")


def rates(run):
    return losses(run, "optim/learning_rate")


@pytest.fixture(scope="module")
def short(one_device, tmp_path_factory, text):
    """A finished run of 24 steps, with checkpoints of steps 16 and 24."""
    root = tmp_path_factory.mktemp("short")
    assert train(text, root, "--name", "x", *RULE) == 0
    return root / "x"


@pytest.fixture
def finished(short, tmp_path):
    """A copy of that run."""
    return shutil.copytree(short, tmp_path / "x")


def test_a_longer_run_has_the_rates_of_a_long_one(finished):
    assert main(["--resume", str(finished), "--steps", str(MORE)]) == 0
    found = rates(finished)
    assert list(found) == list(range(1, MORE + 1)) and saved_step(finished) == MORE
    assert found[25] == pytest.approx(0.02 * 8 / 20)
    assert folder.read_config(finished)[0].steps == MORE
    assert main(["--resume", str(finished), "--steps", str(MORE)]) == 0  # again, as a script does


def test_a_run_made_longer_before_its_rates_fell_is_one_long_run(tmp_path, text):
    """Up to the end of the constant part of the short run, both runs are the same."""
    hold = (*RULE, "--optimizer.hold-share", "0.5")
    assert train(text, tmp_path, "--name", "long", *hold, "--steps", "32") == 0
    with stop_at(8, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "short", *hold) == 143
    assert saved_step(tmp_path / "short") < 12
    assert main(["--resume", str(tmp_path / "short"), "--steps", "32"]) == 0
    assert losses(tmp_path / "short") == losses(tmp_path / "long")
    assert rates(tmp_path / "short") == rates(tmp_path / "long")


def test_a_refused_extension_changes_nothing(finished, capsys):
    before = (finished / "config.json").read_bytes()
    assert main(["--resume", str(finished), "--steps", "20"]) == 2
    assert "has 24 steps: give --steps a larger number" in capsys.readouterr().err
    array = next(iter(finished.glob("checkpoints/24/state/ocdbt.process_0/d/*")))
    array.write_bytes(array.read_bytes()[:-1] + b"?")
    assert main(["--resume", str(finished), "--steps", str(MORE)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert (finished / "config.json").read_bytes() == before


def test_a_run_of_version_0_2_names_the_commit_that_resumes_it(finished, capsys):
    path = finished / "config.json"
    written = json.loads(path.read_text())
    written["config"]["optimizer"]["ema"] = None
    path.write_text(json.dumps(written))
    assert main(["--resume", str(finished)]) == 2
    assert "git checkout 6aced257" in capsys.readouterr().err
