"""Text from a model: the KV cache, windows, and drawing tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import generate
from examples.trainer import models
from examples.trainer.data.tokenizer import end_id
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models.attention import empty_kv_cache
from examples.trainer.models.sampling import Sampling, sample_ids
from examples.trainer.settings.model import ModelConfig
from tests.support.trained_model import logits_after
from tests.support.trainer import on_devices

pytestmark = pytest.mark.usefixtures("one_device")

SHORT = ModelConfig(n_layer=1, d_model=8, context=5)


def test_sample_follows_the_model():
    def next_number(params, tokens, kv_cache, start):  # surely the token after the last, modulo 7
        return 1000.0 * jax.nn.one_hot((jnp.asarray(tokens) + 1) % 7, 7), kv_cache

    # Longer than the window of 5, so that it has to move.
    new = sample_ids(next_number, {}, [0], 12, SHORT, jax.random.key(0))
    assert new == [i % 7 for i in range(1, 13)]


def test_second_sample_of_a_model_compiles_nothing():
    traced = []

    def undecided(params, tokens, kv_cache, start):
        traced.append(tokens.shape)
        return jnp.zeros((*tokens.shape, 60)), kv_cache

    for seed in range(3):
        sample_ids(undecided, {}, [0] * (seed + 1), 4, SHORT, jax.random.key(seed))
    assert traced == [(1, 5), (1, 1)]


def test_uniform_model_gives_varied_samples():
    def undecided(params, tokens, kv_cache, start):
        return jnp.zeros((*tokens.shape, 60)), kv_cache

    new = sample_ids(undecided, {}, [0], 40, SHORT, jax.random.key(0))
    assert len(set(new)) > 10


MODELS = {
    family: ModelConfig(family=family, n_layer=2, n_head=2, d_model=16, context=12, tied=False)
    for family in ("gpt", "llama")
}

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize(("family", "scan"), [("gpt", False), ("llama", True)])
def test_tokens_after_a_kv_cache_get_the_logits_of_one_row(family, scan):
    config = MODELS[family]
    config = type(config)(**{**vars(config), "scan": scan})
    graph, params = nnx.split(models.build(config, 50, nnx.Rngs(0)))
    forward = jax.jit(lambda params, *given: nnx.merge(graph, params).forward(*given))
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 50)
    whole = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))(params, tokens)
    kv_cache, parts, start = empty_kv_cache(config, rows=3), [], 0
    for size in (5, 1, 4, 1, 1):
        logits, kv_cache = forward(params, tokens[:, start : start + size], kv_cache, start)
        parts.append(logits)
        start += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-6)


def test_padding_behind_a_prompt_changes_no_later_token(model):
    # A window that was padded with junk gives the same next tokens as one without.
    ids = [end_id(model.tokenizer), 5, 6]
    junk = np.full((1, model.config.model.context), 7, np.int32)
    junk[0, :3] = ids
    clean = np.asarray(ids, np.int32)[None]
    rest = []
    for window in (junk, clean):
        _, kv_cache = model.forward(model.params, window, empty_kv_cache(model.config.model, 1), 0)
        rest.append(model.forward(model.params, np.array([[8]]), kv_cache, 3)[0])
    np.testing.assert_allclose(*rest, atol=1e-6)


def greedy(model, ids, n_new):
    """The likeliest tokens, one after the other."""
    size, key = model.config.model, jax.random.key(0)
    return sample_ids(model.forward, model.params, ids, n_new, size, key, GREEDY)


def test_greedy_text_is_that_of_whole_passes(varied_model):
    ids = [end_id(varied_model.tokenizer), 40, 41]
    room = varied_model.config.model.context - len(ids)
    text = list(ids)
    for _ in range(room):
        text.append(int(np.argmax(logits_after(varied_model, text)[-1])))
    assert len(set(text)) > room // 2
    assert greedy(varied_model, ids, room) == text[len(ids) :]


def test_text_longer_than_the_context_rereads_its_last_half(varied_model):
    context = varied_model.config.model.context
    ids = [end_id(varied_model.tokenizer)]
    text = [*ids, *greedy(varied_model, ids, 2 * context)]
    # Past the window, each token is drawn after the last half of the first window, and what came
    # after it, until these fill the window again.
    for i in range(context + 1, context + 1 + context // 2):
        seen = text[context // 2 + 1 : i]
        assert text[i] == int(np.argmax(logits_after(varied_model, seen)[-1]))


def test_only_likely_tokens_are_drawn(model):
    ids = [end_id(model.tokenizer)]
    key, size = jax.random.key(3), model.config.model
    flat = Sampling(temperature=5.0, top_k=2)
    first = [
        sample_ids(model.forward, model.params, ids, 1, size, jax.random.fold_in(key, i), flat)
        for i in range(12)
    ]
    likely = np.argsort(logits_after(model, ids)[-1])[-2:]
    assert {i for (i,) in first} == set(likely.tolist())


def test_generate_continues_the_prompt_by_seed(trained_run, capsys):
    assert (
        generate.main([str(trained_run), "--prompt", "def ", "--tokens", "8", "--seed", "1"]) == 0
    )
    one = capsys.readouterr().out
    assert one.startswith("def ") and len(one) > 8
    assert (
        generate.main([str(trained_run), "--prompt", "def ", "--tokens", "8", "--seed", "2"]) == 0
    )
    assert capsys.readouterr().out != one


def test_text_is_the_same_on_several_devices(trained_run):
    texts, text = [], generate.Text(tokens=20, seed=3)
    for devices in (1, 2):
        with on_devices(devices):
            texts.append(generate.generate(CheckpointRef(trained_run), text))
    assert texts[0] == texts[1]
