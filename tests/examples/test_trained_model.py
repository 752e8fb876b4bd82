"""A trained model is loaded from its run, and wrong requests are refused."""

import json

import jax
import pytest

from examples import generate, perplexity
from examples.trainer.data.prepare import prepare
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.system.errors import UserError
from examples.trainer.training.program import make_setup

pytestmark = pytest.mark.usefixtures("one_device")


def test_loaded_parameters_are_those_of_the_step(trained_run, model):
    assert model.step == 24
    other = trained.load(CheckpointRef(trained_run, step=16))
    assert other.step == 16
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model.params, other.params)
    assert not all(jax.tree.leaves(same))
    # The parameters of the last step are those that were evaluated at its end.
    setup = make_setup(model.config, prepare(model.config.data, print), model.mesh)
    records = (trained_run / "metrics.jsonl").read_text().splitlines()
    assert setup.evaluate(model.params).val_loss == json.loads(records[-1])["val_loss"]


def test_loading_needs_only_the_folder_of_the_run(trained_run, tmp_path, model, monkeypatch):
    # Neither its text nor the cache: a folder that was copied elsewhere.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained_run.rename(tmp_path / "moved")
    try:
        moved = trained.load(CheckpointRef(tmp_path / "moved"))
    finally:
        (tmp_path / "moved").rename(trained_run)
    assert moved.tokenizer.to_str() == model.tokenizer.to_str()


def test_folder_without_a_run_is_refused(tmp_path, capsys):
    assert generate.main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_run_without_checkpoints_or_tokenizer_is_refused(trained_run, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((trained_run / name).read_bytes())
    with pytest.raises(UserError, match="has no checkpoints yet"):
        trained.load(CheckpointRef(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        trained.load(CheckpointRef(tmp_path))


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        (generate, ["--tokens", "0"], "--tokens is 0"),
        (generate, ["--seed", str(2**70)], f"--seed is {2**70}"),
        (generate, ["--seed", "-1"], "--seed is -1"),
        (generate, ["--prompt", "\udcff"], "text that is not UTF-8"),
        (generate, ["--temperature", "-1"], "--temperature is -1"),
        (generate, ["--top-k", "0"], "--top-k is 0"),
        (generate, ["--step", "7"], "no checkpoint of --step 7: there are those of 16, 24"),
        (perplexity, ["--texts"], "--texts is empty"),
        (perplexity, ["--texts", "nowhere.txt"], "nowhere.txt does not exist"),
        (perplexity, ["--texts", "{empty}", "--max-bytes", str(2**70)], "no text in these files"),
    ],
)
def test_impossible_requests_are_refused(trained_run, tmp_path, capsys, command, flags, words):
    (tmp_path / "empty.txt").write_text("\n")
    flags = [flag.format(empty=tmp_path / "empty.txt") for flag in flags]
    assert command.main([str(trained_run), *flags]) == 2
    assert words in capsys.readouterr().err
