"""Runs on every kind of text, stopped and resumed: the same windows, and so the same losses."""

import json

import pytest

from examples.train import main
from examples.trainer.runs.metrics import read_metrics
from tests.support import texts
from tests.support.trainer import losses

pytestmark = pytest.mark.usefixtures("one_device")

# One network and one vocabulary, so that the programs are compiled once.
SIZES = "gpt-micro --model.n-layer 1 --model.d-model 16 --model.context 16 --batch-size 8 --steps 4"
OFTEN = "--checkpoint-every 2 --eval-every 2 --eval-batches 1 --sample-tokens 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text of each kind, with one tokenizer."""
    root = tmp_path_factory.mktemp("texts")
    texts.of_two_kinds(root)
    texts.as_on_the_hub(root / "rows", 2)
    return root


def flags(folder, kind):
    given = {
        "prepared": f"--data.source prepared --data.paths {folder}/web",
        "bin": f"--data.source bin --data.paths {folder}/code",
        "earlier order": f"--data.source prepared --data.paths {folder}/web --data.order numpy",
        "hub": f"--data.hub {folder}/rows",
        "mixture": f"--data.mixture {folder}/web=2 {folder}/code=1 hub:{folder}/rows=1",
    }[kind]
    own = f"--data.tokenizer {folder}/tokenizer.json --data.val-fraction 0.3"
    return f"{SIZES} {OFTEN} {given} {own}".split()


@pytest.mark.parametrize("kind", ["prepared", "bin", "earlier order", "hub", "mixture"])
def test_a_run_goes_on_where_it_was(folder, tmp_path, kind, capsys):
    run = tmp_path / "x"
    assert main([*flags(folder, kind), "--runs-dir", str(tmp_path), "--name", "x"]) == 0
    shown = capsys.readouterr().out
    whole, val = losses(run), losses(run, "val_loss")
    settings = json.loads((run / "config.json").read_text())
    if kind == "earlier order":  # as versions without that setting have written it
        assert settings["config"]["data"].pop("order") == "numpy"
        (run / "config.json").write_text(json.dumps(settings))
    if kind == "mixture":
        check_record(folder, read_metrics(run / "metrics.jsonl"), shown)
    (run / "checkpoints" / "4").rename(tmp_path / "moved")
    assert main(["--resume", str(run)]) == 0, capsys.readouterr().err
    assert losses(run) == whole and losses(run, "val_loss") == val
    assert "step 2 to 4" in capsys.readouterr().out


def check_record(folder, records, shown):
    """The run names its texts, and has a validation loss for each."""
    names = [f"{folder}/web", f"{folder}/code", f"hub:{folder}/rows"]
    for name, share in zip(names, ("50.00%", "25.00%", "25.00%"), strict=True):
        assert f"{share} of the rows from {name}, " in shown
    last = records[-1]
    parts = [last[f"val_loss/{name}"] for name in names]
    assert len(set(parts)) == 3
    assert last["val_loss"] == pytest.approx(parts[0] / 2 + parts[1] / 4 + parts[2] / 4, rel=1e-12)
