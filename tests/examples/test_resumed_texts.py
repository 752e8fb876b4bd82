"""Runs on FineWeb and on .bin texts, stopped and resumed: the same windows and losses."""

import pytest

from examples.train import main
from tests.support import texts
from tests.support.trainer import losses

pytestmark = pytest.mark.usefixtures("one_device")

# One network and one vocabulary, so that the programs are compiled once.
SIZES = "gpt-micro --model.n-layer 1 --model.d-model 16 --model.context 16 --batch-size 8 --steps 4"
OFTEN = "--checkpoint-every 2 --eval-every 2 --eval-batches 1 --sample-tokens 2"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A tokenizer, and a cache and a stream for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts.serve(monkeypatch, texts.documents(0))
    return texts.make_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["fineweb", "bin"])
def test_a_run_goes_on_where_it_was(words, tmp_path, kind, monkeypatch, capsys):
    given = f"--data.source {kind} --data.val-fraction 0.3 --data.tokenizer {words}"
    if kind == "bin":
        given += f" --data.paths {texts.bins(tmp_path / 'bin', words, 1)}"
    run = tmp_path / "x"
    assert main(f"{SIZES} {OFTEN} {given} --runs-dir {tmp_path} --name x".split()) == 0
    whole, val = losses(run), losses(run, "val_loss")
    (run / "checkpoints" / "4").rename(tmp_path / "moved")
    texts.serve(monkeypatch, [], until=0)  # what is in the cache is not streamed again
    assert main(["--resume", str(run)]) == 0, capsys.readouterr().err
    assert losses(run) == whole and losses(run, "val_loss") == val
    assert "from step 2 on" in capsys.readouterr().out
