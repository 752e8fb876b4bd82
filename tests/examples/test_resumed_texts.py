"""Runs on prepared and .bin texts, stopped and resumed: the same windows and losses."""

import pytest

from examples.train import main
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
    words = texts.make_tokenizer(root / "tokenizer.json")
    texts.prepared(root / "prepared", words, 0)
    texts.bins(root / "bin", words, 1)
    return root


@pytest.mark.parametrize("kind", ["prepared", "bin"])
def test_a_run_goes_on_where_it_was(folder, tmp_path, kind, capsys):
    given = f"--data.source {kind} --data.paths {folder}/{kind}"
    own = f"--data.tokenizer {folder}/tokenizer.json --runs-dir {tmp_path} --name x"
    run = tmp_path / "x"
    assert main(f"{SIZES} {OFTEN} {given} {own}".split()) == 0
    whole, val = losses(run), losses(run, "val_loss")
    (run / "checkpoints" / "4").rename(tmp_path / "moved")
    assert main(["--resume", str(run)]) == 0, capsys.readouterr().err
    assert losses(run) == whole and losses(run, "val_loss") == val
    assert "step 2 to 4" in capsys.readouterr().out
