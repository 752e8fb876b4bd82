"""From text to batches: documents, the split, the tokenizer, the cache, and the loader."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.trainer.data import corpus, tokenizer
from examples.trainer.data.loader import Loader
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import DataConfig


def test_standard_library_is_the_default():
    documents = corpus.read(DataConfig(max_bytes=200_000))
    assert 100_000 < sum(len(document.encode()) for document in documents) <= 200_000
    names = {path.as_posix() for path in corpus.standard_library()}
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name for name in names)


def test_validation_split_depends_on_content_only(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.md").write_text(f"document {i} " * 50)
    (tmp_path / "copy.md").write_bytes((tmp_path / "7.md").read_bytes())
    config = DataConfig(paths=(str(tmp_path),), val_fraction=0.2)
    train, val = corpus.split(corpus.read(config), config.val_fraction)
    assert len(val) in (8, 9) and len(train) + len(val) == len({*train, *val}) == 40
    for i in range(40):  # other names, same content
        (tmp_path / f"{i}.md").rename(tmp_path / f"{99 - i}.txt")
    assert corpus.split(corpus.read(config), config.val_fraction) == (train, val)


@pytest.mark.parametrize("text", ["word " * 9000, "x" * 50_000, "a line\n" * 7000, "é" * 30_000])
def test_pieces_join_to_the_text(text):
    pieces = list(corpus.cut(text, 8000))
    assert "".join(pieces) == text
    assert min(map(len, pieces[:-1])) > 4000 and max(map(len, pieces)) <= 8000


def test_split_of_one_file_has_the_wanted_share(text):
    train, val = corpus.split(corpus.read(DataConfig(paths=(str(text),))), 0.05)
    size = sum(map(len, val))
    assert 0.05 <= size / (size + sum(map(len, train))) < 0.065


def test_byte_limit_does_not_split_a_character(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é" * 100, encoding="utf-8")
    assert "".join(corpus.read(DataConfig(paths=(str(path),), max_bytes=51))) == "é" * 25


def test_tokenizer_is_lossless(tmp_path):
    text = "def f(x):\n\treturn  x\r\n\n  naïve 日本語 🎉 \x00 <|endoftext|> end \n"
    trained = tokenizer.train(["some other text"], 300)
    (tmp_path / "t.json").write_text(trained.to_str(), encoding="utf-8")
    loaded = tokenizer.load(tmp_path / "t.json")
    [(_, [end, *ids])] = tokenizer.encode(loaded, [text])
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert end == tokenizer.end_id(loaded) and end not in ids  # END inside a text is only text


def test_tokens_decode_to_the_documents(text):
    config = DataConfig(paths=(str(text),), vocab_size=300)
    dataset = prepare(config, lambda line: None)
    train, val = corpus.split(corpus.read(config), config.val_fraction)
    for tokens, documents in ((dataset.train, train), (dataset.val, val)):
        decoded = dataset.tokenizer.decode(tokens.ids[:].tolist(), skip_special_tokens=False)
        assert decoded == "".join(tokenizer.END + document for document in documents)
        assert tokens.bytes == sum(len(document.encode()) for document in documents)


def test_cache_is_used_and_repaired(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(paths=(str(text),), vocab_size=310)
    said = []
    first = prepare(config, said.append)
    assert len(said) == 2
    again = prepare(config, said.append)
    assert len(said) == 2 and again.key == first.key
    [folder] = [path.parent for path in tmp_path.rglob("index.json")]
    ids = np.array(first.train.ids[:])
    path = folder / "train-00000.bin"
    for name, damage in {
        "train-00000.bin": path.read_bytes()[:-2],
        "val-00000.bin": bytes(len((folder / "val-00000.bin").read_bytes())),
        "tokenizer.json": Tokenizer.from_file(str(folder / "tokenizer.json")).to_str().encode()[1:],
        "index.json": b"{}",
    }.items():
        said.clear()
        (folder / name).unlink()  # and not overwritten: the file is mapped
        (folder / name).write_bytes(damage)
        repaired = prepare(config, said.append)
        assert str(folder / name) in said[0] or f"{folder}/{name}" in said[0]
        np.testing.assert_array_equal(repaired.train.ids[:], ids)


LOADER = Loader(np.arange(10 * 4 + 1, dtype=np.uint16), context=4, batch_size=3, seed=0)


def test_batch_is_a_function_of_seed_and_step():
    forwards = [LOADER.batch(step)[0] for step in range(8)]
    backwards = [LOADER.batch(step)[0] for step in reversed(range(8))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    other = dataclasses.replace(LOADER, seed=1)
    assert not np.array_equal(forwards, [other.batch(step)[0] for step in range(8)])


def test_targets_are_the_next_tokens():
    inputs, targets = LOADER.batch(5)
    assert inputs.shape == targets.shape == (3, 4) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, inputs + 1)  # the text counts up


def test_epochs_are_complete_and_reshuffled():
    starts = np.concatenate([LOADER.batch(step)[0][:, 0] for step in range(10)])
    epochs = starts.reshape(3, 10)  # batches of 3 run across the ends of epochs of 10
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(0, 40, 4))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_rows_of_processes_make_up_the_batch():
    whole = LOADER.batch(7)
    parts = [LOADER.batch(7, rows=range(*ends)) for ends in ((0, 1), (1, 3))]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])
