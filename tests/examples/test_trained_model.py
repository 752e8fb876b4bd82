"""A trained model from its run: loading, text, losses of given tokens, and wrong requests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import generate
from examples.trainer.data.prepare import prepare
from examples.trainer.data.tokenizer import end_of
from examples.trainer.runs import trained
from examples.trainer.runs.loop import evaluate, make_run
from examples.trainer.runs.metrics import METRICS
from examples.trainer.runs.trained import CheckpointRef, Sampling, sample_ids
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import read_json_lines
from tests.support.trained_model import logits_after
from tests.support.trainer import on_devices, shared_functions

pytestmark = pytest.mark.usefixtures("one_device")


def test_loaded_parameters_are_those_of_the_step(trained_run, model):
    assert model.step == 24
    other = trained.load(CheckpointRef(trained_run, step=16))
    assert other.step == 16
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model.params, other.params)
    assert not all(jax.tree.leaves(same))
    # The parameters of the last step are those that were evaluated at its end.
    dataset = prepare(model.config.data, print)
    run = make_run(model.config, dataset, model.mesh, shared_functions)
    last = read_json_lines(trained_run / METRICS)[-1]
    assert evaluate(run, model.params)["val_loss"] == last["val_loss"]


def test_loading_needs_only_the_folder_of_the_run(trained_run, tmp_path, model, monkeypatch):
    # Neither its text nor the cache: a folder that was copied elsewhere.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained_run.rename(tmp_path / "moved")
    try:
        moved = trained.load(CheckpointRef(tmp_path / "moved"))
    finally:
        (tmp_path / "moved").rename(trained_run)
    assert moved.tokenizer.to_str() == model.tokenizer.to_str()


def test_run_without_checkpoints_or_settings_is_refused(trained_run, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((trained_run / name).read_bytes())
    with pytest.raises(UserError, match=r"has no checkpoint of step 1: .* no step yet"):
        trained.load(CheckpointRef(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        trained.load(CheckpointRef(tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "\udcff"], "text that is not UTF-8"),
        (["--step", "7"], "no checkpoint of step 7: there are those of 16, 24"),
    ],
)
def test_impossible_requests_are_refused(trained_run, capsys, flags, words):
    assert generate.main([str(trained_run), *flags]) == 2
    assert words in capsys.readouterr().err


# Text


GREEDY = Sampling(temperature=0.0)


def test_sample_follows_the_model():
    def next_number(params, tokens):  # surely the token after the last, modulo 7
        return 1000.0 * jax.nn.one_hot((jnp.asarray(tokens) + 1) % 7, 7)

    # Longer than the window of 5, so that it has to move.
    new = sample_ids(next_number, {}, [0], 12, 5, jax.random.key(0), Sampling())
    assert new == [i % 7 for i in range(1, 13)]


def test_second_sample_of_a_model_compiles_nothing():
    traced = []

    def undecided(params, tokens):
        traced.append(tokens.shape)
        return jnp.zeros((*tokens.shape, 60))

    for seed in range(3):
        sample_ids(undecided, {}, [0] * (seed + 1), 4, 5, jax.random.key(seed), Sampling())
    assert traced == [(1, 5)]


def greedy(model, ids, n_new):
    """The likeliest tokens, one after the other."""
    size, key = model.config.model.context, jax.random.key(0)
    return sample_ids(model.forward, model.params, ids, n_new, size, key, GREEDY)


def test_greedy_text_follows_the_last_tokens_of_the_context(varied_model):
    context = varied_model.config.model.context
    text = ids = [end_of(varied_model.tokenizer)[1], 40, 41]
    for _ in range(context + 3):
        text = [*text, int(np.argmax(logits_after(varied_model, text[-context:])[-1]))]
    assert len(set(text)) > context // 2
    assert greedy(varied_model, ids, context + 3) == text[len(ids) :]


def test_only_likely_tokens_are_drawn(model):
    ids = [end_of(model.tokenizer)[1]]
    key, size = jax.random.key(3), model.config.model.context
    flat = Sampling(temperature=5.0, top_k=2)
    first = [
        sample_ids(model.forward, model.params, ids, 1, size, jax.random.fold_in(key, i), flat)
        for i in range(12)
    ]
    likely = np.argsort(logits_after(model, ids)[-1])[-2:]
    assert {i for (i,) in first} == set(likely.tolist())


def test_generate_continues_the_prompt_by_seed(trained_run, capsys):
    asked = [str(trained_run), "--prompt", "def ", "--tokens", "8", "--seed"]
    texts = []
    for seed in ("1", "2"):
        assert generate.main([*asked, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("def ") and len(texts[0]) > 8
    assert texts[0] != texts[1]


def test_text_is_the_same_on_several_devices(trained_run):
    texts, text = [], generate.Text(tokens=20, seed=3)
    for devices in (1, 2):
        with on_devices(devices):
            texts.append(generate.generate(CheckpointRef(trained_run), text))
    assert texts[0] == texts[1]
