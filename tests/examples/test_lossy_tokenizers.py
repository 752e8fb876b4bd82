"""Tokenizers that lose text, or have no token for some of it: what is said, and what is not."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from examples import data, perplexity
from examples.trainer.data import tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.runs.metrics import read_metrics
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import on_devices, quiet, train

WORDS = ["The cat", "sat on", "a mat"]
TEXT = [f"{WORDS[i % 3]} {WORDS[i // 3 % 3]}\n" for i in range(600)]
VOCABULARY = {"<s>": 0, "[UNK]": 1, "The": 2, "cat": 3}


def unknown():
    """Most words are [UNK]."""
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def bytewise(normalizer=None, without=""):
    """All bytes, but for some that have no token; a normalizer may change the text before."""
    letters = [x for x in pre_tokenizers.ByteLevel.alphabet() if x not in without]
    made = Tokenizer(models.BPE({"<s>": 0, **{x: i for i, x in enumerate(letters, 1)}}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    return made


LOSSY = {
    "unknown words": unknown(),
    "no space": bytewise(without="\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"),
    "lower case": bytewise(normalizers.Lowercase()),
    "spaces stripped": bytewise(normalizers.Strip()),
}
LOSSLESS = {"all bytes": bytewise(), "a space before": bytewise(normalizers.Prepend(" "))}


def saved(folder, made):
    made.save(str(folder / "own.json"))
    return str(folder / "own.json")


@pytest.mark.parametrize("name", [*LOSSY, *LOSSLESS])
def test_text_that_does_not_come_back_is_counted(tmp_path, name, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("".join(TEXT))
    own = saved(tmp_path, (LOSSY | LOSSLESS)[name])
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer=own)
    assert (prepare(config, quiet).lost > 0.1) == (name in LOSSY)
    rows = "".join(json.dumps({"text": line}) + "\n" for line in TEXT)
    (tmp_path / "a.jsonl").write_text(rows)
    flags = ["--paths", str(tmp_path / "a.jsonl"), "--tokenizer", own, "--val-fraction", "0.2"]
    assert data.main(["prepare", "--out", str(tmp_path / "out"), *flags]) == 0
    config = DataConfig(source="prepared", paths=(str(tmp_path / "out"),))
    assert (prepare(config, quiet).lost > 0.1) == (name in LOSSY)


def test_unknown_tokens_of_bin_files_are_counted(tmp_path):
    own = saved(tmp_path, unknown())
    for split in ("train", "val"):
        np.asarray([2, 3, 1, 2] * 99, "<u2").tofile(tmp_path / f"{split}.bin")
    found = prepare(DataConfig(source="bin", paths=(str(tmp_path),), tokenizer=own), quiet)
    assert found.lost == 0.25


def test_bits_per_byte_are_left_out_and_it_is_said(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(TEXT * 9))
    own = saved(tmp_path, unknown())
    with on_devices(1):
        flags = ["--name", "x", "--data.tokenizer", own]
        assert train(tmp_path / "a.txt", tmp_path, *flags) == 0
        shown = capsys.readouterr().out
        measured = [str(tmp_path / "x"), "--texts", str(tmp_path / "a.txt")]
        assert perplexity.main(measured) == 0
    assert re.search(r"the tokenizer loses [\d.]+% of the validation text", shown)
    for text in (shown, capsys.readouterr().out):
        assert "bits per byte" in text and not re.search(r"bits per byte +\d", text)
        assert "not comparable: the tokenizer loses text" in text
    records = read_metrics(tmp_path / "x" / "metrics.jsonl")
    assert any("val_perplexity" in record for record in records)
    assert not any("val_bits_per_byte" in record for record in records)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (models.BPE(), "has no words"),
        (models.WordLevel({"<s>": 0, "The": 1}), "no tokens for some of the text"),
        (models.WordPiece({"<s>": 0, "The": 1}), "no tokens for some of the text"),
        (models.Unigram([("<s>", 0.0), ("t", -1.0)], None, False), "no tokens for some"),
        (models.BPE({"<s>": 0}, [], unk_token="?"), "no tokens for some of the text"),
    ],
)
def test_a_tokenizer_without_a_word_for_the_rest_is_refused(tmp_path, model, said):
    with pytest.raises(UserError, match=said):
        loaded = tokenizer.load(Path(saved(tmp_path, Tokenizer(model))))
        list(tokenizer.encode(loaded, TEXT))
