"""FineWeb from a stream: what is taken of it, interruptions, damage, and what is said."""

import contextlib
import dataclasses
import sys
import types

import numpy as np
import pytest

from examples import data
from examples.trainer.data import fineweb, token_folder, tokenizer
from examples.trainer.data.corpus import split_by
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

ROWS = [f"row {i}: " + "some words on the web\n" * (1 + i * 7 % 11) for i in range(1200)]


class Stream:
    """As much of a `datasets.IterableDataset` as is used; ends with an error after `until` rows."""

    def __init__(self, until=None):
        self.until, self.skipped = until, 0

    def skip(self, n):
        self.skipped = n
        return self

    def __iter__(self):
        for i, text in enumerate(ROWS):
            if i == self.until:
                raise ConnectionError("the line was cut")
            if i >= self.skipped:
                yield {"text": text, "id": i}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A small limit, a local tokenizer, small shards, a cache of its own and a whole stream."""
    path = tmp_path / "tokenizer.json"
    tokenizer.train(ROWS[:50], 280).save(str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_folder, "SHARD_TOKENS", 3000)
    serve(monkeypatch, Stream())
    return DataConfig(source="fineweb", tokens=2e4, tokenizer=str(path), val_fraction=0.2)


def serve(monkeypatch, stream):
    monkeypatch.setattr(fineweb, "open_stream", lambda: stream)


def refuse():
    raise AssertionError("a finished text needs no hub")


def test_the_stream_becomes_shards(config, monkeypatch, tmp_path):
    said = []
    found = prepare(config, said.append)
    assert 20_000 <= found.train.meta.tokens < 20_200
    assert len(list(tmp_path.rglob("train-*.bin"))) > 3
    documents = {}
    for split in ("train", "val"):
        ids = getattr(found, split).ids[:].tolist()
        decoded = found.tokenizer.decode(ids, skip_special_tokens=False)
        documents[split] = decoded.split(tokenizer.END)[1:]
    read = ROWS[: sum(map(len, documents.values()))]
    for split, own in documents.items():
        assert own == [row for row in read if split_by(0.2)(row) == split]
        assert getattr(found, split).meta.bytes == sum(len(row.encode()) for row in own)
    assert 0.14 < len(documents["val"]) / len(read) < 0.26
    assert "20,000 training tokens, from 0" in said[0] and "tokens" in said[-1]
    monkeypatch.setattr(fineweb, "open_stream", refuse)
    assert prepare(config, quiet).key == found.key


def test_an_interrupted_stream_goes_on(config, monkeypatch, tmp_path):
    whole = prepare(config, quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    serve(monkeypatch, Stream(600))
    with pytest.raises(
        UserError, match=r"more of FineWeb .*: the line was cut\. Without a network"
    ):
        prepare(config, quiet)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("second/**/train-*.bin")}
    assert kept
    serve(monkeypatch, Stream())
    said = []
    again = prepare(config, said.append)
    assert again.key == whole.key and "from 0;" not in said[0]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    for split in ("train", "val"):
        ids = (getattr(each, split).ids[:] for each in (again, whole))
        np.testing.assert_array_equal(*ids)


@pytest.mark.parametrize("name", ["train-00001.bin", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("until", [None, 600])
def test_damage_is_named(config, monkeypatch, tmp_path, name, until):
    serve(monkeypatch, Stream(until))
    with contextlib.suppress(UserError):
        prepare(config, quiet)
    [path] = tmp_path.glob(f"cache/**/fineweb-*/{name}")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{name}.* Delete the folder .*/fineweb-"):
        prepare(config, quiet)


def test_a_stream_that_ends_early_is_taken_whole(config):
    said = []
    prepare(dataclasses.replace(config, tokens=1e9), said.append)
    assert any("FineWeb ends after" in line for line in said)


def test_the_package_is_asked_for_the_sample(monkeypatch, capsys):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        raise ConnectionError("no network\nat all")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"cannot get FineWeb from the .* hub: no network\. With"):
        fineweb.open_stream()
    options = {"name": "sample-100BT", "split": "train", "streaming": True}
    assert asked == [(("HuggingFaceFW/fineweb",), options)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package datasets .*requirements/fineweb\.txt"):
        fineweb.open_stream()
    assert data.main(["--source", "fineweb", "--paths", "x"]) == 2
    assert "--data.source fineweb: give no --data.paths" in capsys.readouterr().err
