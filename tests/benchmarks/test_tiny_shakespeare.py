"""nanoGPT's character model of tiny Shakespeare."""

import hashlib
import json

import numpy as np
import pytest

from benchmarks.yardsticks import intervals, tiny_shakespeare
from examples.trainer.system.errors import UserError


@pytest.fixture
def text(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    words = " ".join(rng.choice(["to", "be", "or", "not"], size=600))
    path = tmp_path / "input.txt"
    path.write_text(words)
    monkeypatch.setattr(tiny_shakespeare, "SHA256", hashlib.sha256(words.encode()).hexdigest())
    monkeypatch.setattr(intervals, "versions", lambda *packages: {})
    return path


def test_the_split_is_nanogpts(tmp_path):
    tiny_shakespeare.write_split("cab" * 10, tmp_path)
    ids = [np.fromfile(tmp_path / f"{split}.bin", "<u2") for split in ("train", "val")]
    np.testing.assert_array_equal(np.concatenate(ids), [2, 0, 1] * 10)
    assert len(ids[1]) == 3


def test_another_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist: give data/tinyshakespeare"):
        tiny_shakespeare.write_tokens(tmp_path / "none.txt", tmp_path)
    (tmp_path / "other.txt").write_text("other")
    with pytest.raises(UserError, match="another text: its SHA-256 is not 86c4e6aa"):
        tiny_shakespeare.write_tokens(tmp_path / "other.txt", tmp_path)


def test_rates_are_chosen_by_three_seeds_and_others_answer(text, tmp_path, capsys):
    config = tiny_shakespeare.Config(
        text=text, only=("AdamW as published", "Muon max"), rates=(0.005, 0.01, 0.02),
        second_rates=(0.004, 0.008), seeds=5, steps=3, layers=1, width=16, context=16,
        batch_size=8, runs_dir=tmp_path / "runs", out=tmp_path / "out",
    )  # fmt: skip
    assert tiny_shakespeare.main(config) == 0
    file = tmp_path / "out" / "tiny-shakespeare.json"
    published, muon = json.loads(file.read_text())["rows"]
    assert (published["rate"], published["second"]) == ("0.001", "0.001")
    assert [*muon["nats_by_seed"]] == ["3", "4"] == [*published["nats_by_seed"]]
    assert muon["second"] in ("0.004", "0.008") and 1 < muon["nats_by_seed"]["3"] < 4
    gap = np.mean([published["nats_by_seed"][x] - muon["nats_by_seed"][x] for x in "34"])
    assert published["difference"].startswith(f"{gap:.4f} ±") and not muon["difference"]
    assert "1.88 nats a character" in capsys.readouterr().out


def test_a_row_that_there_is_not_is_named(text, tmp_path):
    config = tiny_shakespeare.Config(text=text, only=("Mano",), runs_dir=tmp_path)
    with pytest.raises(UserError, match="--only Mano: give one of 'AdamW as published'"):
        tiny_shakespeare.main(config)
