"""The tasks of lm_eval on a trained model, from local files."""

import functools
import json
import math
import unittest.mock

import datasets
import numpy as np
import pytest

from examples import tasks
from examples.trainer.data.tokenizer import end_id
from tests.support.trained_model import logits_after, naive_losses

pytestmark = pytest.mark.usefixtures("one_device")

QUESTIONS = [
    {"question": "def f(x):\n    return", "choices": [" x", " zebra", " 12"], "answer": 0},
    {"question": "import", "choices": [" sys", " os", " qqq"], "answer": 1},
    {"question": "", "choices": ["the", "class"], "answer": 0},
    {"question": "self." * 30, "choices": ["name", "value"], "answer": 1},  # beyond the window
]


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A folder with tasks of each kind over a local file; of lm_eval's own none is read."""
    own_only = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", own_only)
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


def test_task_scores_equal_log_probabilities(trained_run, model, questions, capsys):
    names = ["--tasks", "choose", "rolling", "write", "--include", str(questions)]
    assert tasks.main([str(trained_run), *names, "--batch-size", "3"]) == 0
    shown = capsys.readouterr().out
    assert "choose" in shown and "acc_norm" in shown
    results = json.loads((trained_run / "tasks.json").read_text())
    assert results["step"] == 24
    scores = [[logprob(model, q["question"], c) for c in q["choices"]] for q in QUESTIONS]
    right = [np.argmax(s) == q["answer"] for s, q in zip(scores, QUESTIONS, strict=True)]
    assert results["results"]["choose"]["acc,none"] == pytest.approx(np.mean(right))
    nats = size = 0.0
    for q in QUESTIONS:
        text = q["question"] + "x"
        ids = [end_id(model.tokenizer), *model.tokenizer.encode(text).ids]
        rows = tasks.windows(ids, model.config.model.context)
        nats += sum(naive_losses(model, row).sum() for row in rows)
        size += len(text.encode())
    bits = results["results"]["rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert results["results"]["write"]["exact_match,none"] == 0


def test_answers_after_long_questions(varied_model):
    # Of a question that is longer than the window, its end counts.
    lm = tasks.JaxLM(varied_model, batch_size=2)
    asked = [(q["question"], choice) for q in QUESTIONS for choice in q["choices"]]
    found = lm.loglikelihood([unittest.mock.Mock(args=pair) for pair in asked], disable_tqdm=True)
    for (nats, _), pair in zip(found, asked, strict=True):
        assert nats == pytest.approx(logprob(varied_model, *pair), rel=1e-4)


def test_answers_end_where_they_are_told_to(model):
    lm = tasks.JaxLM(model, batch_size=2)
    ids = iter([model.tokenizer.encode("one two(three").ids, [7, lm.eot_token_id, 8]])
    ask = [unittest.mock.Mock(args=("q", {"until": ["("]})) for _ in range(2)]
    with unittest.mock.patch.object(tasks, "sample_ids", side_effect=lambda *args: next(ids)):
        assert lm.generate_until(ask) == ["one two", model.tokenizer.decode([7])]


def test_an_unknown_task_is_refused(trained_run, capsys, questions):
    given = [str(trained_run), "--include", str(questions), "--tasks"]
    assert tasks.main([*given, "choose", "colours"]) == 2
    assert "there is no task colours:" in capsys.readouterr().err


def test_scores_do_not_depend_on_the_batch(model):
    rng = np.random.default_rng(0)
    lengths = [2, 17, 9, 3, 16, 5, 17]  # context is 16
    rows = [rng.integers(0, 300, n).tolist() for n in lengths]
    for batch_size in (1, 3, 16):
        scores = tasks.JaxLM(model, batch_size).score(rows)
        for row, (nats, hits) in zip(rows, scores, strict=True):
            np.testing.assert_allclose(nats, naive_losses(model, row), atol=2e-5)
            assert (hits == (np.argmax(logits_after(model, row[:-1]), -1) == row[1:])).all()


def test_windows_hold_every_token_as_target_once():
    rows = tasks.windows(list(range(10)), 4)
    assert rows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    assert tasks.windows(list(range(9)), 4)[-1] == [4, 5, 6, 7, 8]
