"""What is done with a trained model: text, perplexity, tasks."""

import dataclasses
import functools
import json
import math
import unittest.mock

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_examples import train

from examples import generate, harness, models, perplexity, scoring, tasks, trained
from examples.data.prepare import prepare
from examples.data.tokenizer import end_id
from examples.errors import UserError
from examples.generate import Sampling, sample_ids
from examples.job import assemble
from examples.models.attention import no_tokens
from examples.models.config import ModelConfig
from examples.trained import Place

MODELS = {
    family: ModelConfig(family=family, n_layer=2, n_head=2, d_model=16, context=12, tied=False)
    for family in ("gpt", "llama")
}
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with unittest.mock.patch.object(jax, "devices", return_value=jax.devices()[:1]):
        yield


@pytest.fixture(scope="module")
def run(one_device, tmp_path_factory, text):
    """The folder of a finished run, with checkpoints of steps 16 and 24."""
    root = tmp_path_factory.mktemp("runs")
    assert train(text, root, "--name", "x") == 0
    return root / "x"


@pytest.fixture(scope="module")
def model(run):
    return trained.load(Place(run))


@pytest.fixture(scope="module")
def lively(model):
    """The model with other parameters, so that it does not say the same token again and again."""
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = [0.5 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    params = [x + e for x, e in zip(leaves, noise, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, params))


@functools.cache
def one_row(extend):
    return jax.jit(lambda params, row: extend(params, row, None, 0)[0][0])


def logits_after(model, ids):
    """The logits after each token, from one pass over one row, which is padded behind."""
    row = np.zeros((1, model.config.model.context), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(one_row(model.extend)(model.params, row), np.float64)[: len(ids)]


def naive_losses(model, ids):
    """Nats of each token after the first."""
    logits = logits_after(model, ids[:-1])
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return total - logits[np.arange(len(ids) - 1), ids[1:]]


# Keys and values that are kept


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_after_a_past_are_as_in_one_row(family, scan):
    config = MODELS[family]
    config = type(config)(**{**vars(config), "scan": scan})
    network = models.build(config, 50, nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 50)
    whole = network(tokens)
    past, parts, start = no_tokens(config, rows=3), [], 0
    for size in (5, 1, 4, 1, 1):
        logits, past = network.extend(tokens[:, start : start + size], past, jnp.asarray(start))
        parts.append(logits)
        start += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-6)


def test_what_lies_behind_is_written_over(model):
    # A window that was padded with junk gives the same next tokens as one without.
    ids = [end_id(model.tokenizer), 5, 6]
    junk = np.full((1, model.config.model.context), 7, np.int32)
    junk[0, :3] = ids
    clean = np.asarray(ids, np.int32)[None]
    rest = []
    for window in (junk, clean):
        _, past = model.extend(model.params, window, no_tokens(model.config.model, 1), 0)
        rest.append(model.extend(model.params, np.array([[8]]), past, 3)[0])
    np.testing.assert_allclose(*rest, atol=1e-6)


def greedy(model, ids, n_new):
    """The likeliest tokens, one after the other."""
    size, key = model.config.model, jax.random.key(0)
    return sample_ids(model.extend, model.params, ids, n_new, size, key, GREEDY)


def test_greedy_text_is_that_of_whole_passes(lively):
    ids = [end_id(lively.tokenizer), 40, 41]
    room = lively.config.model.context - len(ids)
    text = list(ids)
    for _ in range(room):
        text.append(int(np.argmax(logits_after(lively, text)[-1])))
    assert len(set(text)) > room // 2
    assert greedy(lively, ids, room) == text[len(ids) :]


def test_text_outgrows_the_window(lively):
    context = lively.config.model.context
    ids = [end_id(lively.tokenizer)]
    text = [*ids, *greedy(lively, ids, 2 * context)]
    # Past the window, each token is drawn after the last half of the first window, and what came
    # after it, until these fill the window again.
    for i in range(context + 1, context + 1 + context // 2):
        seen = text[context // 2 + 1 : i]
        assert text[i] == int(np.argmax(logits_after(lively, seen)[-1]))


def test_only_likely_tokens_are_drawn(model):
    ids = [end_id(model.tokenizer)]
    key, size = jax.random.key(3), model.config.model
    flat = Sampling(temperature=5.0, top_k=2)
    first = [
        sample_ids(model.extend, model.params, ids, 1, size, jax.random.fold_in(key, i), flat)
        for i in range(12)
    ]
    likely = np.argsort(logits_after(model, ids)[-1])[-2:]
    assert {i for (i,) in first} == set(likely.tolist())


def test_generate_command(run, capsys):
    assert generate.main([str(run), "--prompt", "def ", "--tokens", "8", "--seed", "1"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("def ") and len(one) > 8
    assert generate.main([str(run), "--prompt", "def ", "--tokens", "8", "--seed", "2"]) == 0
    assert capsys.readouterr().out != one


# Checkpoints


def test_parameters_alone_are_read(run, model):
    assert model.step == 24
    other = trained.load(Place(run, step=16))
    assert other.step == 16
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model.params, other.params)
    assert not all(jax.tree.leaves(same))
    # The parameters of the last step are those that were evaluated at its end.
    job = assemble(model.config, prepare(model.config.data, print), model.mesh)
    records = (run / "metrics.jsonl").read_text().splitlines()
    assert job.evaluate(model.params).val_loss == json.loads(records[-1])["val_loss"]


def test_a_run_is_enough(run, tmp_path, model, monkeypatch):
    # Neither its text nor the cache: a folder that was copied elsewhere.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run.rename(tmp_path / "moved")
    try:
        moved = trained.load(Place(tmp_path / "moved"))
    finally:
        (tmp_path / "moved").rename(run)
    assert moved.tokenizer.to_str() == model.tokenizer.to_str()


# Losses of given tokens


def test_scores_do_not_depend_on_company(model):
    rng = np.random.default_rng(0)
    lengths = [2, 17, 9, 3, 16, 5, 17]  # context is 16
    rows = [rng.integers(0, 300, n).tolist() for n in lengths]
    for batch_size in (1, 3, 16):
        for row, (nats, hits) in zip(rows, scoring.score(model, rows, batch_size), strict=True):
            expected = naive_losses(model, row)
            np.testing.assert_allclose(nats, expected, atol=2e-5)
            assert hits.shape == nats.shape
            assert (hits == (np.argmax(logits_after(model, row[:-1]), -1) == row[1:])).all()


def test_every_token_once():
    rows = scoring.windows(list(range(10)), 4)
    assert rows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    assert scoring.windows(list(range(9)), 4)[-1] == [4, 5, 6, 7, 8]


def test_perplexity_of_a_text(run, model, tmp_path, capsys):
    content = "for i in range(10):\n    print(i, 'é')\n"
    (tmp_path / "a.txt").write_text(content)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "x = 1"}) + "\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    flags = ["--text-field", "body", "--batch-size", "2"]
    assert perplexity.main([str(run), "--texts", *files, *flags]) == 0
    shown = capsys.readouterr().out
    end, encode = end_id(model.tokenizer), model.tokenizer.encode
    ids = [end, *encode(content).ids, end, *encode("x = 1").ids]
    rows = scoring.windows(ids, model.config.model.context)
    nats = np.concatenate([naive_losses(model, row) for row in rows])
    assert len(nats) == len(ids) - 1
    size = len(content.encode()) + 5
    assert f"perplexity     {math.exp(nats.mean()):.2f}" in shown
    assert f"bits per byte  {nats.sum() / math.log(2) / size:.4f}" in shown
    assert f"text           {size:,} bytes, {len(nats):,} tokens" in shown


# Tasks of lm_eval

QUESTIONS = [
    {"question": "def f(x):\n    return", "choices": [" x", " zebra", " 12"], "answer": 0},
    {"question": "import", "choices": [" sys", " os", " qqq"], "answer": 1},
    {"question": "", "choices": ["the", "class"], "answer": 0},
    {"question": "self." * 30, "choices": ["name", "value"], "answer": 1},  # beyond the window
]


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A folder with tasks of each kind over a local file."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    shared = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'q.jsonl'}\n"
        "test_split: test\n"
    )
    choose = (
        'task: choose\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    rolling = (
        'task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{question}}x"\nmetric_list:\n  - metric: bits_per_byte\n'
    )
    write = (
        'task: write\noutput_type: generate_until\ndoc_to_text: "{{question}}"\n'
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs:\n  until: ["("]\n  max_gen_toks: 6\n'
        "metric_list:\n  - metric: exact_match\n"
    )
    for i, own in enumerate((choose, rolling, write)):
        (tmp_path / f"task{i}.yaml").write_text(shared + own)
    return tmp_path


def logprob(model, before, after):
    """Of a continuation, as tokens after the last of the question that fit."""
    encode = model.tokenizer.encode
    ids = [end_id(model.tokenizer), *encode(before + after).ids]
    n = len(ids) - 1 - len(encode(before).ids)
    return -naive_losses(model, ids[-(model.config.model.context + 1) :])[-n:].sum()


def test_tasks(run, model, questions, capsys):
    names = ["--tasks", "choose", "rolling", "write", "--include", str(questions)]
    assert tasks.main([str(run), *names, "--batch-size", "3"]) == 0
    shown = capsys.readouterr().out
    assert "choose" in shown and "acc_norm" in shown
    results = json.loads((run / "tasks.json").read_text())
    assert results["step"] == 24
    scores = [[logprob(model, q["question"], c) for c in q["choices"]] for q in QUESTIONS]
    right = [np.argmax(s) == q["answer"] for s, q in zip(scores, QUESTIONS, strict=True)]
    assert results["results"]["choose"]["acc,none"] == pytest.approx(np.mean(right))
    each = [
        [s / len(c) for s, c in zip(line, q["choices"], strict=True)]
        for line, q in zip(scores, QUESTIONS, strict=True)
    ]
    right = [np.argmax(s) == q["answer"] for s, q in zip(each, QUESTIONS, strict=True)]
    assert results["results"]["choose"]["acc_norm,none"] == pytest.approx(np.mean(right))
    nats = size = 0.0
    for q in QUESTIONS:
        text = q["question"] + "x"
        ids = [end_id(model.tokenizer), *model.tokenizer.encode(text).ids]
        rows = scoring.windows(ids, model.config.model.context)
        nats += sum(naive_losses(model, row).sum() for row in rows)
        size += len(text.encode())
    bits = results["results"]["rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert results["results"]["write"]["exact_match,none"] == 0


def test_answers_after_long_questions(lively):
    # Of a question that is longer than the window, its end counts.
    lm = harness.JaxLM(lively, batch_size=2)
    asked = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
    found = lm.loglikelihood([unittest.mock.Mock(args=pair) for pair in asked], disable_tqdm=True)
    for (nats, _), pair in zip(found, asked, strict=True):
        assert nats == pytest.approx(logprob(lively, *pair), rel=1e-4)


def test_answers_end_where_they_are_told_to(model):
    lm = harness.JaxLM(model, batch_size=2)
    ids = iter([model.tokenizer.encode("one two(three").ids, [7, lm.eot_token_id, 8]])
    ask = [unittest.mock.Mock(args=("q", {"until": ["("]})) for _ in range(2)]
    with unittest.mock.patch.object(harness, "sample_ids", side_effect=lambda *args: next(ids)):
        assert lm.generate_until(ask) == ["one two", model.tokenizer.decode([7])]


# What a person can get wrong


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        (generate, ["--tokens", "0"], "--tokens is 0"),
        (generate, ["--temperature", "-1"], "--temperature is -1"),
        (generate, ["--top-k", "0"], "--top-k is 0"),
        (generate, ["--step", "7"], "no checkpoint of --step 7: there are those of 16, 24"),
        (perplexity, ["--texts"], "--texts is empty"),
        (perplexity, ["--texts", "nowhere.txt"], "nowhere.txt does not exist"),
        (perplexity, ["--texts", "{empty}"], "no text in these files"),
    ],
)
def test_what_cannot_be(run, tmp_path, capsys, command, flags, words):
    (tmp_path / "empty.txt").write_text("\n")
    flags = [flag.format(empty=tmp_path / "empty.txt") for flag in flags]
    assert command.main([str(run), *flags]) == 2
    assert words in capsys.readouterr().err


def test_no_run(tmp_path, capsys):
    assert generate.main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_a_run_without_checkpoints(run, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    with pytest.raises(UserError, match="has no checkpoints yet"):
        trained.load(Place(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        trained.load(Place(tmp_path))


def test_tasks_that_cannot_be(run, capsys, questions):
    assert tasks.main([str(run), "--tasks", "colours"]) == 2
    assert "there is no task colours" in capsys.readouterr().err
    (questions / "q.jsonl").unlink()
    assert tasks.main([str(run), "--tasks", "choose", "--include", str(questions)]) == 2
    assert "cannot be read" in capsys.readouterr().err
