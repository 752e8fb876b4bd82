"""FineWeb from a stream: what is taken of it, interruptions, damage, and what is said."""

import dataclasses
import os
import sys
import types

import numpy as np
import pytest

from examples import data
from examples.trainer.data import prepare as preparation
from examples.trainer.data import tokenizer
from examples.trainer.data.corpus import split_of
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.texts import serve
from tests.support.trainer import quiet

ROWS = [f"row {i}: " + "some words on the web\n" * (1 + i * 7 % 11) for i in range(1200)]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A small limit, a local tokenizer, frequent saves, a cache of its own and a whole stream."""
    path = tmp_path / "tokenizer.json"
    tokenizer.train(ROWS[:50], 280).save(str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(preparation, "SAVED_TOKENS", 3000)
    serve(monkeypatch, ROWS)
    return DataConfig(source="fineweb", tokens=2e4, tokenizer=str(path), val_fraction=0.2)


def test_the_stream_becomes_files(config, monkeypatch, tmp_path):
    said = []
    found = prepare(config, said.append)
    assert 20_000 <= len(found.train.ids) < 20_200
    assert len(said) > 6  # a save after every 3,000 tokens
    documents = {}
    for split in ("train", "val"):
        ids = getattr(found, split).ids[:].tolist()
        decoded = found.tokenizer.decode(ids, skip_special_tokens=False)
        documents[split] = decoded.split(tokenizer.END)[1:]
    read = ROWS[: sum(map(len, documents.values()))]
    for split, own in documents.items():
        assert own == [row for row in read if split_of(row, 0.2) == split]
        assert getattr(found, split).bytes == sum(len(row.encode()) for row in own)
    assert "from document 0 on" in said[0] and "tokens" in said[-1]
    monkeypatch.setattr(preparation, "stream", lambda start: pytest.fail("the cache has the text"))
    assert prepare(config, quiet).key == found.key


def test_an_interrupted_stream_goes_on_and_is_not_read_as_whole(config, monkeypatch, tmp_path):
    whole = prepare(config, quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    serve(monkeypatch, ROWS, until=600)
    with pytest.raises(UserError, match=r"more of FineWeb .*: the line was cut\. The same command"):
        prepare(config, quiet)
    [path] = tmp_path.glob("second/**/train.bin")
    kept = path.read_bytes()
    index = preparation.read_index(path.parent)
    assert 0 < 2 * index["train"]["tokens"] <= len(kept)  # what came after the last save is again
    serve(monkeypatch, ROWS)
    said = []
    again = prepare(config, said.append)
    assert again.key == whole.key and "document 0 on" not in said[0]
    assert path.read_bytes().startswith(kept[: 2 * index["train"]["tokens"]])
    for split in ("train", "val"):
        ids = (getattr(each, split).ids[:] for each in (again, whole))
        np.testing.assert_array_equal(*ids)


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("until", [None, 600])
def test_damage_is_named(config, monkeypatch, tmp_path, name, until):
    serve(monkeypatch, ROWS, until)
    if until:
        with pytest.raises(UserError, match="the line was cut"):
            prepare(config, quiet)
    else:
        prepare(config, quiet)
    [path] = tmp_path.glob(f"cache/**/fineweb-*/{name}")
    size = path.stat().st_size if name != "train.bin" else 3000
    path.write_bytes(path.read_bytes()[: size - 2])
    with pytest.raises(
        UserError, match=rf"{name}.* (is then made again|Make it again|is cut or damaged)"
    ):
        prepare(config, quiet)


def test_the_package_is_asked_for_the_sample(config, monkeypatch, capsys):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"get more of FineWeb from the .* hub: no network\."):
        prepare(config, quiet)
    options = {"name": "sample-100BT", "split": "train", "streaming": True}
    assert asked == [(("HuggingFaceFW/fineweb",), options)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package datasets .*requirements/fineweb\.txt"):
        prepare(config, quiet)
    assert data.main(["--source", "fineweb", "--paths", "x"]) == 2
    assert "--data.source fineweb: give no --data.paths" in capsys.readouterr().err


def test_a_pipe_is_no_tokenizer(config, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for source in ("fineweb", "files"):
        given = dataclasses.replace(config, source=source, tokenizer=str(tmp_path / "pipe"))
        with pytest.raises(UserError, match="pipe is no regular file"):
            prepare(given, quiet)
