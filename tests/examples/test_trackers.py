"""Trackers get the figures of metrics.jsonl; one that fails is left out, and the run goes on."""

import shutil
import sys
import time
import types

import pytest

from examples.train import main
from examples.trainer.system.files import read_json_lines
from tests.support.trainer import STEPS, losses

pytestmark = pytest.mark.usefixtures("one_device")


class Fake(types.ModuleType):
    """A package like wandb, which may fail from some call on."""

    def __init__(self, failing_from=None):
        super().__init__("wandb")
        self.calls, self.failing_from = [], failing_from

    def called(self, kind, **given):
        self.calls.append((kind, given))
        if self.failing_from is not None and len(self.calls) > self.failing_from:
            raise ConnectionError("no route to host.\nand more")

    def init(self, **given):
        self.called("init", **given)

    def log(self, figures, step):
        self.called("log", figures=figures, step=step)

    def finish(self):
        self.called("finish")


@pytest.fixture
def tracked(trained_run, tmp_path):
    """A finished run, to be resumed from its step 16 with flags; the steps 17 to 24 are made."""

    def resume(*flags):
        run = shutil.copytree(trained_run, tmp_path / "x")
        shutil.rmtree(run / "checkpoints" / str(STEPS))
        assert main(["--resume", str(run), *flags]) == 0
        assert list(losses(run)) == list(range(1, STEPS + 1))
        return run

    return resume


def test_figures_are_those_of_the_record(tracked, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = tracked("--tracker", "wandb")
    (_, begun), *logged, (last, _) = fake.calls
    assert begun["name"] == "x" and begun["resume"] == "allow"
    assert begun["id"] == (run / "tracker_id").read_text() and last == "finish"
    assert begun["config"]["steps"] == STEPS
    found = {}
    for _, given in logged:
        found.setdefault(given["step"], {}).update(given["figures"])
    recorded = {}
    for record in read_json_lines(run / "metrics.jsonl"):
        if record["step"] > 16:
            recorded.setdefault(record.pop("step"), {}).update(record)
    assert found == recorded and "val_loss" in found[STEPS]
    assert main(["--resume", str(run), "--tracker", "wandb"]) == 0
    ids = {given["id"] for kind, given in fake.calls if kind == "init"}
    assert len(ids) == 1  # the same run there too


@pytest.mark.parametrize("calls", [0, 1, 4, 10])
def test_a_tracker_that_fails_does_not_stop_the_run(tracked, monkeypatch, capsys, calls):
    fake = Fake(failing_from=calls)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracked("--tracker", "wandb")
    shown = capsys.readouterr().out
    assert shown.count("--tracker wandb is left out from here on: no route to host.") == 1
    assert len(fake.calls) == calls + 1


def test_tensorboard_is_read_back(tracked):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tracked("--tracker", "tensorboard")
    shutil.rmtree(run / "checkpoints" / str(STEPS))
    time.sleep(1.1)  # files are named by the second
    assert main(["--resume", str(run), "--tracker", "tensorboard"]) == 0  # the same steps again
    events = reader.EventAccumulator(str(run / "tensorboard")).Reload()
    for name, tag in (("train_loss", "train_loss"), ("val_loss", "val_loss")):
        found = {event.step: event.value for event in events.Scalars(tag)}
        expected = {step: x for step, x in losses(run, name).items() if step > 16}
        assert found == pytest.approx(expected) and len(events.Scalars(tag)) == len(expected)
    assert "optim/learning_rate" in events.Tags()["scalars"]
