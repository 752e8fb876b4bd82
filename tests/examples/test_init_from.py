"""Runs that begin with weights in Hugging Face's form, and the command that writes them."""

import json
import math
import shutil

import numpy as np
import pytest

from examples import export
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from tests.support.trainer import CUBE, STEPS, losses, on_devices, train

pytest.importorskip("safetensors")
NORM = ("--model.final-norm", "layer")
SHORT = ["--steps", "2", "--batch-size", "8", "--eval-batches", "2", "--sample-tokens", "4"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, text):
    """A run, and the folder of its export."""
    root = tmp_path_factory.mktemp("exported")
    with on_devices(1):
        assert train(text, root, "--name", "x", *NORM, "--model.scan") == 0
        assert export.main([str(root / "x"), str(root / "hf")]) == 0
    return root / "x", root / "hf"


def test_a_run_begins_where_the_exported_one_ended(exported, text, tmp_path, capsys):
    run, folder = exported
    given = ["--runs-dir", str(tmp_path), "--data.paths", str(text), *SHORT]
    rates = ["--optimizer.learning-rate", "0", "--optimizer.adam-learning-rate", "0"]
    with on_devices(1):
        begun = ["gpt-micro", "--init-from", str(folder), "--name", "y", *given, *rates]
        assert main(begun) == 0, capsys.readouterr().err
        before, after = (trained.load(CheckpointRef(x)) for x in (run, tmp_path / "y"))
    assert after.config.init_from == str(folder) and after.config.model.final_norm == "layer"
    assert after.tokenizer.to_str() == before.tokenizer.to_str()
    assert losses(tmp_path / "y", "val_loss")[2] == losses(run, "val_loss")[STEPS]
    assert export.main([str(tmp_path / "y"), str(tmp_path / "again")]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.several_devices
def test_all_meshes_begin_alike(exported, text, tmp_path):
    _, folder = exported
    given = ["--init-from", str(folder), "--runs-dir", str(tmp_path), "--data.paths", str(text)]
    with on_devices(1):
        assert main(["gpt-micro", *given, *SHORT, "--name", "one"]) == 0
    assert main(["gpt-micro", *given, *SHORT, "--name", "many", "--mesh", CUBE]) == 0
    one, many = (list(losses(tmp_path / name).values()) for name in ("one", "many"))
    np.testing.assert_allclose(many, one, rtol=1e-5)


def test_a_run_without_a_checkpoint_begins_again(exported, text, tmp_path):
    _, folder = exported
    shutil.copytree(folder, tmp_path / "hf")
    with on_devices(1):
        given = ["--init-from", str(tmp_path / "hf"), "--data.paths", str(text), *SHORT]
        assert main(["gpt-micro", *given, "--runs-dir", str(tmp_path), "--name", "y"]) == 0
        before = losses(tmp_path / "y")
        shutil.rmtree(tmp_path / "y" / "checkpoints")
        assert main(["--resume", str(tmp_path / "y")]) == 0
        assert losses(tmp_path / "y") == before
        (tmp_path / "hf" / "model.safetensors").unlink()  # what is trained needs it no more
        assert main(["--resume", str(tmp_path / "y")]) == 0
    assert math.isfinite(before[1])


def test_what_does_not_fit_leaves_no_run(exported, text, tmp_path, capsys):
    _, folder = exported
    given = ["--init-from", str(folder), "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    with on_devices(1):
        assert main(["gpt-micro", *given, "--model.n-layer", "3"]) == 2
        assert "--model.n-layer is 3, and" in capsys.readouterr().err
        trained = [*given, "--data.tokenizer", "", "--data.vocab-size"]
        assert main(["gpt-micro", *trained, "310"]) == 2
        assert "vocab-size is 300, and the tokenizer of the run has" in capsys.readouterr().err
        assert main(["gpt-micro", *trained, "290"]) == 2
        assert "a tokenizer that is trained on the text has other" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command(exported, tmp_path, capsys):
    run, _ = exported
    given = [str(run), str(tmp_path / "x")]
    with on_devices(1):
        assert export.main([*given, "--step", "16", "--dtype", "bfloat16"]) == 0
        assert "step 16 of" in capsys.readouterr().out
        written = json.loads((tmp_path / "x" / "config.json").read_text())
        assert written["torch_dtype"] == "bfloat16"
        assert export.main(given) == 2
        assert "--overwrite" in capsys.readouterr().err
        assert export.main([*given, "--overwrite"]) == 0
        assert export.main([*given, "--shard-bytes", "0"]) == 2
