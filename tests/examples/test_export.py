"""Exports: the arrays, the configuration and the tokenizer that transformers reads."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import export
from examples.train import main
from examples.trainer.system.errors import UserError
from examples.weights import from_state_dict
from tests.support.hugging_face import GPT, LLAMA, TOKENS, V, logits, params_of, write
from tests.support.trainer import losses, on_devices, train

safetensors_numpy = pytest.importorskip("safetensors.numpy")

NETWORKS = {
    "gpt": GPT,
    "gpt untied": dataclasses.replace(GPT, tied=False, d_ff=None),
    "gpt stacked": dataclasses.replace(GPT, scan=True),
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tied=True, scan=True),
}


def read(folder, config):
    """The parameters of a folder; linear layers of GPT-2 lie there as (in, out)."""
    found = safetensors_numpy.load_file(folder / "model.safetensors")
    if config.family == "gpt":
        layers = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        found = {name: x.T if name.endswith(layers) else x for name, x in found.items()}
    return from_state_dict(found, config, V)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_arrays_are_the_parameters(tmp_path, name, dtype):
    config = dataclasses.replace(NETWORKS[name], param_dtype=dtype)
    params = params_of(config)
    write(tmp_path / "out", config, params, dtype)
    again = read(tmp_path / "out", config)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_transformers_computes_the_same_logits(tmp_path, name):
    torch, transformers = (pytest.importorskip(x) for x in ("torch", "transformers"))
    config = NETWORKS[name]
    params = params_of(config)
    write(tmp_path / "out", config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(found, logits(config, params), atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab").input_ids[0] == tokenizer.bos_token_id == 0


def test_the_tokenizer_begins_texts_as_in_training(tmp_path):
    write(tmp_path / "out", GPT, params_of(GPT))
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert made.encode("ab").ids[0] == 0 and made.decode(made.encode("ab").ids) == "ab"
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["vocab_size"], values["n_positions"], values["bos_token_id"]) == (V, 12, 0)


def test_the_published_norm_is_one_that_transformers_lacks(tmp_path):
    with pytest.raises(UserError, match=r"--model.final-norm rms: .* layer to export"):
        published = dataclasses.replace(GPT, final_norm="rms")
        write(tmp_path / "x", published, params_of(published))
    assert not list(tmp_path.iterdir())


def test_the_command_exports_a_run(text, tmp_path, capsys):
    with on_devices(1):
        layer = ("--model.final-norm", "layer", "--steps", "1")
        assert train(text, tmp_path, "--name", "x", *layer) == 0
        assert export.main([str(tmp_path / "x"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert "step 1 of" in capsys.readouterr().out
    arrays = safetensors_numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert {str(x.dtype) for x in arrays.values()} == {"bfloat16"}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_run_begins_from_the_weights_of_a_run_or_of_an_export(text, tmp_path, family):
    """The first loss is that of the weights; the network and the tokenizer are theirs."""
    rate = ("--optimizer.learning-rate", "0", "--steps", "1")
    model = ("--model.family", family, *(("--model.final-norm", "layer") * (family == "gpt")))
    with on_devices(1):
        assert train(text, tmp_path, "--name", "x", *model) == 0
        assert export.main([str(tmp_path / "x"), str(tmp_path / "hf")]) == 0
        end = losses(tmp_path / "x", "val_loss")[24]
        for name, source, scan in (("a", "x", ()), ("b", "hf", ("--model.scan",))):
            given = ("--init-from", str(tmp_path / source), "--model.n-layer", "3")
            assert train(text, tmp_path, "--name", name, *given, *rate, *scan) == 0
            assert losses(tmp_path / name, "val_loss")[1] == pytest.approx(end, abs=2e-5)
            tokenizers = {(tmp_path / x / "tokenizer.json").read_text() for x in ("x", name)}
            assert len(tokenizers) == 1 or source == "hf"


def test_weights_of_another_network_are_refused(tmp_path, capsys):
    write(tmp_path / "out", LLAMA, params_of(LLAMA))
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    for change, words in (
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and the trainer's network has 4"),
        ({"model_type": "qwen3"}, "has a qwen3, neither a gpt2 nor a llama"),
    ):
        path.write_text(json.dumps({**values, **change}))
        assert main(["gpt-micro", "--init-from", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    assert main(["gpt-micro", "--init-from", str(tmp_path)]) == 2
    assert "neither a run nor a folder of transformers" in capsys.readouterr().err
