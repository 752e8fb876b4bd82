"""Networks with more words than the tokenizer has tokens, as LLaMA 3's and nanoGPT's may have."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from examples import export, generate, perplexity
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models.sampling import Sampling, sample_ids
from examples.trainer.models.state_dict import abstract
from examples.trainer.settings.hugging_face import to_settings
from examples.trainer.settings.model import ModelConfig, training_flops_per_token
from examples.trainer.training.loss import head_loss, token_scores
from examples.trainer.training.step import make_forward, on_targets
from tests.support.hugging_face import (
    GPT,
    LLAMA,
    TOKENS,
    V,
    logits,
    one_device,
    params_of,
    read,
    write,
)
from tests.support.texts import BEGIN, END, like_llama_3
from tests.support.trainer import losses, on_devices

WORDS = 320


def of_tokens(path, x):
    """An array of the network that has the tokens alone."""
    name = jax.tree_util.keystr(path)
    return x[:V] if "wte" in name else x[:, :V] if "lm_head" in name else x


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_padded_weights_load_and_give_the_logits_of_the_tokens(tmp_path, config):
    pytest.importorskip("safetensors")
    padded = dataclasses.replace(config, vocab_size=WORDS)
    params = params_of(padded)
    write(tmp_path / "x", padded, params)
    assert json.loads((tmp_path / "x/config.json").read_text())["vocab_size"] == WORDS
    found, again = read(tmp_path / "x")
    assert found.vocab_size == WORDS and again["wte"]["embedding"].shape == (WORDS, 16)
    expected = logits(config, jax.tree.map_with_path(of_tokens, params))
    np.testing.assert_allclose(logits(found, again), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_has_all_words_in_its_softmax():
    """As nanoGPT trains with 50,304 words, and as transformers computes it."""
    padded = dataclasses.replace(LLAMA, vocab_size=WORDS)
    params = params_of(padded)
    forward = make_forward(LLAMA, WORDS, one_device())  # of a tokenizer that has all words
    every = np.asarray(forward(params, TOKENS[:, :-1], None, 0)[0], np.float64)
    assert every.shape[-1] == WORDS
    nats = np.log(np.exp(every).sum(-1)) - np.take_along_axis(every, TOKENS[:, 1:, None], 2)[..., 0]
    given = params, TOKENS[:, :-1], TOKENS[:, 1:]
    loss = on_targets(head_loss, padded, V, one_device())(*given)
    np.testing.assert_allclose(loss, nats.mean(), rtol=1e-5)
    scores = on_targets(token_scores, padded, V, one_device())(*given)
    np.testing.assert_allclose(scores[0], nats, rtol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(5.0, WORDS)], ids=["best", "any"])
def test_no_word_is_drawn_that_the_tokenizer_lacks(sampling):
    padded = dataclasses.replace(LLAMA, vocab_size=WORDS)
    params = params_of(padded)
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[:, V:].multiply(50.0)
    full = make_forward(LLAMA, WORDS, one_device())(params, TOKENS, None, 0)[0]
    assert (np.asarray(full).argmax(-1) >= V).mean() > 0.9  # they would be
    forward = make_forward(padded, V, one_device())
    for seed in range(2):
        drawn = sample_ids(forward, params, [seed], 30, padded, jax.random.key(seed), sampling)
        assert len(drawn) == 30 and max(drawn) < V


def test_operations_are_those_of_the_padded_head():
    more = training_flops_per_token(dataclasses.replace(GPT, vocab_size=WORDS), V)
    assert more - training_flops_per_token(GPT, V) == 6 * GPT.d_model * (WORDS - V)


@pytest.fixture
def llama_3(tmp_path):
    """Random weights of a LLaMA with 384 words in a folder whose tokenizer has 259 tokens."""
    pytest.importorskip("safetensors")
    folder = tmp_path / "llama-3"
    network = dataclasses.replace(LLAMA, vocab_size=384)
    write(folder, network, params_of(network))
    like_llama_3(folder, tokenizer_config={"bos_token": {"content": BEGIN}, "eos_token": END})
    return folder


def test_a_folder_of_llama_3_from_the_first_step_to_its_export(llama_3, text, tmp_path, capsys):
    given = ["gpt-micro", "--init-from", str(llama_3), "--data.paths", str(text), "--steps", "2"]
    given += ["--batch-size", "8", "--eval-batches", "2", "--sample-tokens", "4"]
    with on_devices(1):
        assert main([*given, "--runs-dir", str(tmp_path), "--name", "x"]) == 0
        assert "259 in the vocabulary, padded to 384" in capsys.readouterr().out
        before = losses(tmp_path / "x")
        # A resume is of the token that the run began with, whatever the model's folder says now.
        (llama_3 / "tokenizer_config.json").write_text(json.dumps({"bos_token": END}))
        (tmp_path / "x/checkpoints/2").rename(tmp_path / "2")
        assert main(["--resume", str(tmp_path / "x")]) == 0
        assert losses(tmp_path / "x") == before and math.isfinite(before[1])
        assert export.main([str(tmp_path / "x"), str(tmp_path / "hf")]) == 0
        assert generate.main([str(tmp_path / "x"), "--tokens", "5"]) == 0
        assert perplexity.main([str(tmp_path / "x"), "--texts", str(text)]) == 0
        model = trained.load(CheckpointRef(tmp_path / "x"))
    assert model.params["lm_head"]["kernel"].shape == (16, 384)
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert (values["vocab_size"], values["bos_token_id"]) == (384, 256)
    config = to_settings(tmp_path / "hf", ModelConfig())
    assert abstract(config, 259) == jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params
    )
