"""Runs that adapt a model: from its export to an export, and the worked example."""

import json
import shutil
import unittest.mock

import jax
import numpy as np
import pytest

from examples import export, finetune
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.settings import command_line
from tests.support.trainer import losses, on_devices, train

pytest.importorskip("safetensors")
SHORT = ["gpt-micro", "--batch-size", "8", "--eval-batches", "2", "--sample-tokens", "4"]
SHORT += ["--checkpoint-every", "4", "--model.scan"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, text):
    """The folder of an export, and a run with LoRA that begins with it."""
    root = tmp_path_factory.mktemp("adapted")
    given = ["--runs-dir", str(root), "--data.paths", str(text), "--lora.rank", "2"]
    with on_devices(1):
        flags = ("--model.final-norm", "layer", "--model.scan", "--name", "x")
        assert train(text, root, *flags) == 0
        assert export.main([str(root / "x"), str(root / "hf")]) == 0
        from_it = ["--init-from", str(root / "hf"), "--name", "y", "--steps", "8", "--ema", "0.9"]
        assert main([*SHORT, *given, *from_it]) == 0
    return root / "hf", root / "y"


def test_the_base_stays_and_the_adapters_learn(adapted):
    _, run = adapted
    before = trained.load(CheckpointRef(run.parent / "x")).params
    after = trained.load(CheckpointRef(run)).params
    found = dict(jax.tree.leaves_with_path(after))
    for path, x in jax.tree.leaves_with_path(before):
        np.testing.assert_array_equal(found[path], x)
    assert np.any(np.asarray(after["blocks"]["attn"]["qkv"]["lora_b"]))


def test_the_average_of_adapters_is_loaded_with_the_base(adapted):
    _, run = adapted
    last, mean = (trained.load(CheckpointRef(run, weights=x)).params for x in ("last", "ema"))
    found = dict(jax.tree.leaves_with_path(mean))
    for path, x in jax.tree.leaves_with_path(last):
        assert np.array_equal(found[path], x) == ("lora" not in path[-1].key), path


def test_it_resumes_as_if_it_had_not_stopped(adapted, text, tmp_path):
    hf, run = adapted
    given = ["--runs-dir", str(tmp_path), "--data.paths", str(text), "--lora.rank", "2"]
    with on_devices(1):
        assert main([*SHORT, *given, "--init-from", str(hf), "--name", "z", "--steps", "8"]) == 0
        shutil.rmtree(tmp_path / "z" / "checkpoints" / "8")
        assert main(["--resume", str(tmp_path / "z")]) == 0
    assert losses(tmp_path / "z") == losses(run)


def test_an_export_has_the_adapters_in_the_kernels_or_apart(adapted, tmp_path, capsys):
    hf, run = adapted
    with on_devices(1):
        assert export.main([str(run), str(tmp_path / "merged")]) == 0
        assert export.main([str(run), str(tmp_path / "apart"), "--no-merged"]) == 0
        again = ["--init-from", str(tmp_path / "merged"), "--runs-dir", str(tmp_path)]
        rates = ["--optimizer.learning-rate", "0", "--optimizer.adam-learning-rate", "0"]
        config = json.loads((run / "config.json").read_text())["config"]
        paths = ["--data.paths", *config["data"]["paths"], "--steps", "1", "--name", "m"]
        assert main([*SHORT, *again, *rates, *paths]) == 0
    np.testing.assert_allclose(
        losses(tmp_path / "m", "val_loss")[1], losses(run, "val_loss")[8], rtol=1e-5
    )
    values = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(hf) and values["r"] == 2
    assert "transformer.h.0.attn.c_attn" in values["target_modules"]
    assert export.main([str(run.parent / "x"), str(tmp_path / "no"), "--no-merged"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_refuses_adapters_without_weights(text, tmp_path, capsys):
    assert train(text, tmp_path, "--lora.rank", "2", "--name", "x") == 2
    assert "--init-from" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_worked_example(tmp_path):
    """With the second of both pretrainings, which differ in their flags."""
    for flags in finetune.PRETRAINING.values():
        command_line.parse([*finetune.BOTH, *flags])
    small = ("--model.n-layer", "1", "--eval-every", "10", "--eval-batches", "2")
    both = (*finetune.BOTH, *small, "--sample-tokens", "4")
    one = {"muonplus": finetune.PRETRAINING["muonplus"]}
    with (
        on_devices(1),
        unittest.mock.patch.object(finetune, "BOTH", both),
        unittest.mock.patch.object(finetune, "PRETRAINING", one),
    ):
        lines = finetune.compare(
            tmp_path, 12, 30, width=16, rank=2, rates=(0.01,), seeds=(0,)
        ).splitlines()
    assert len(lines) == 2 + len(finetune.RULES)
    for rule in finetune.RULES:
        run = tmp_path / f"muonplus-{rule.replace(' ', '-')}-0.01-0"
        values = losses(run, "val_loss")
        assert values[30] < values[10], rule
