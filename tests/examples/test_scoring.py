"""Losses of given tokens under a trained model, and the perplexity of texts."""

import json
import math

import numpy as np
import pytest

from examples import perplexity
from examples.trainer.data.tokenizer import end_id
from examples.trainer.inference import trained
from tests.support.trained_model import logits_after, naive_losses

pytestmark = pytest.mark.usefixtures("one_device")


def test_scores_do_not_depend_on_the_batch(model):
    rng = np.random.default_rng(0)
    lengths = [2, 17, 9, 3, 16, 5, 17]  # context is 16
    rows = [rng.integers(0, 300, n).tolist() for n in lengths]
    for batch_size in (1, 3, 16):
        for row, (nats, hits) in zip(rows, trained.score(model, rows, batch_size), strict=True):
            expected = naive_losses(model, row)
            np.testing.assert_allclose(nats, expected, atol=2e-5)
            assert hits.shape == nats.shape
            assert (hits == (np.argmax(logits_after(model, row[:-1]), -1) == row[1:])).all()


def test_windows_hold_every_token_as_target_once():
    rows = trained.windows(list(range(10)), 4)
    assert rows == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9]]
    assert trained.windows(list(range(9)), 4)[-1] == [4, 5, 6, 7, 8]


def test_perplexity_equals_that_of_whole_passes(trained_run, model, tmp_path, capsys):
    content = "for i in range(10):\n    print(i, 'é')\n"
    (tmp_path / "a.txt").write_text(content)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "x = 1"}) + "\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    flags = ["--text-field", "body", "--batch-size", "2"]
    assert perplexity.main([str(trained_run), "--texts", *files, *flags]) == 0
    shown = capsys.readouterr().out
    end, encode = end_id(model.tokenizer), model.tokenizer.encode
    ids = [end, *encode(content).ids, end, *encode("x = 1").ids]
    rows = trained.windows(ids, model.config.model.context)
    nats = np.concatenate([naive_losses(model, row) for row in rows])
    assert len(nats) == len(ids) - 1
    size = len(content.encode()) + 5
    assert f"perplexity     {math.exp(nats.mean()):.2f}" in shown
    assert f"bits per byte  {nats.sum() / math.log(2) / size:.4f}" in shown
    assert f"text           {size:,} bytes, {len(nats):,} tokens" in shown
