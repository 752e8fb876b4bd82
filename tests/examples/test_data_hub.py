"""FineWeb from a stream that the test makes: shards, the split, interruptions, no network."""

import contextlib
import shutil
import sys
import types

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from examples.trainer.data import hub, token_folder, tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

ROWS = [f"row {i}: " + "some words on the web\n" * (1 + i * 7 % 11) for i in range(1200)]

NO_NETWORK = r".*from the Hugging Face hub: .*no network.*--data\.paths FILES.*default text"


class Stream:
    """As much of a `datasets.IterableDataset` as is used; ends with an error after `until` rows."""

    def __init__(self, rows, until=None):
        self.rows, self.until, self.skipped = rows, until, 0

    def skip(self, n):
        self.skipped = n
        return self

    def __iter__(self):
        for i, text in enumerate(self.rows):
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
    serve(monkeypatch, Stream(ROWS))
    return DataConfig(source="fineweb", tokens=2e4, tokenizer=str(path), val_fraction=0.2)


def serve(monkeypatch, stream):
    monkeypatch.setattr(hub, "open_stream", lambda source: stream)


def refuse(source):
    raise AssertionError("a finished text needs no hub")


def test_the_stream_becomes_shards(config, monkeypatch, tmp_path):
    said = []
    dataset = prepare(config, said.append)
    assert 20_000 <= dataset.train.size < 20_200
    assert len(list(tmp_path.rglob("train-*.bin"))) > 3
    decoded = [
        dataset.tokenizer.decode(part.ids[:].tolist(), skip_special_tokens=False).split(
            tokenizer.END
        )[1:]
        for part in (dataset.train, dataset.val)
    ]
    train, val = decoded
    read = ROWS[: len(train) + len(val)]
    assert val == [row for row in read if hub.is_held_out(row, 0.2)] and len(val) > 10
    assert train == [row for row in read if not hub.is_held_out(row, 0.2)]
    for part, rows in ((dataset.train, train), (dataset.val, val)):
        assert part.bytes == sum(len(row.encode()) for row in rows)
    assert "20,000 training tokens, from 0" in said[0] and "tokens" in said[-1]
    monkeypatch.setattr(hub, "open_stream", refuse)
    assert prepare(config, quiet).key == dataset.key


def test_an_interrupted_stream_goes_on(config, monkeypatch, tmp_path):
    whole = prepare(config, quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    serve(monkeypatch, Stream(ROWS, until=600))
    with pytest.raises(UserError, match=NO_NETWORK):
        prepare(config, quiet)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("second/**/train-*.bin")}
    assert kept
    stream = Stream(ROWS)
    serve(monkeypatch, stream)
    said = []
    again = prepare(config, said.append)
    assert 0 < stream.skipped <= 600 and "from 0;" not in said[0]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert again.key == whole.key
    np.testing.assert_array_equal(again.train.ids[:], whole.train.ids[:])
    np.testing.assert_array_equal(again.val.ids[:], whole.val.ids[:])


def damaged(path):
    """Cuts off the end of a file; not in its place, as it may be mapped."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-2])


@pytest.mark.parametrize("name", ["train-00001.bin", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("until", [None, 600])
def test_damage_is_named_and_streamed_again(config, monkeypatch, tmp_path, name, until):
    serve(monkeypatch, Stream(ROWS, until))
    with pytest.raises(UserError, match=NO_NETWORK) if until else contextlib.nullcontext():
        prepare(config, quiet)
    [path] = (tmp_path / "cache").rglob(name)
    damaged(path)
    serve(monkeypatch, Stream(ROWS))
    with pytest.raises(UserError, match=rf"{name} .* Delete the folder {path.parent}:"):
        prepare(config, quiet)
    shutil.rmtree(path.parent)
    found = prepare(config, quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    assert prepare(config, quiet).key == found.key


def test_a_stream_that_ends_early(config, monkeypatch):
    serve(monkeypatch, Stream(ROWS[:30]))
    said = []
    dataset = prepare(config, said.append)
    assert "ends after" in said[-1] and 0 < dataset.train.size < 20_000
    assert prepare(config, refuse).key == dataset.key


def test_a_stream_of_the_package_itself(config, monkeypatch, tmp_path):
    expected = prepare(config, quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    files = [str(tmp_path / f"{i}.parquet") for i in range(3)]
    for i, file in enumerate(files):
        table = pyarrow.table({"id": range(400), "text": ROWS[400 * i : 400 * (i + 1)]})
        parquet.write_table(table, file, row_group_size=90)

    def local():
        return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)

    def cut(skip):
        yield from local().take(600)
        raise ConnectionError("the line was cut")

    serve(monkeypatch, types.SimpleNamespace(skip=cut))
    with pytest.raises(UserError, match=NO_NETWORK):
        prepare(config, quiet)
    assert list(tmp_path.glob("second/**/train-*.bin"))
    serve(monkeypatch, local())
    again = prepare(config, quiet)
    np.testing.assert_array_equal(again.train.ids[:], expected.train.ids[:])
    np.testing.assert_array_equal(again.val.ids[:], expected.val.ids[:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"paths": ("a.txt",)}, "reads no --data.paths"),
        ({"tokenizer": "gpt5"}, "--data.tokenizer gpt5 is neither"),
    ],
)
def test_bad_fineweb_settings_are_refused(config, changes, said):
    with pytest.raises(UserError, match=said):
        prepare(
            DataConfig(**{"source": "fineweb", "tokenizer": config.tokenizer, **changes}), quiet
        )


def hub_without_network(*args, **kwargs):
    raise ConnectionError("Couldn't reach 'HuggingFaceFW/fineweb' on the Hub")


def test_missing_network_is_reported_with_alternatives(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(source="fineweb")
    module = types.SimpleNamespace(load_dataset=hub_without_network)
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(UserError, match=rf"cannot get FineWeb{NO_NETWORK}"):
        prepare(config, quiet)
    serve(monkeypatch, Stream(ROWS))  # the stream is there, the tokenizer is not
    offline = types.SimpleNamespace(
        from_pretrained=hub_without_network, from_file=Tokenizer.from_file
    )
    monkeypatch.setattr(tokenizer, "Tokenizer", offline)
    with pytest.raises(UserError, match=rf"the tokenizer openai-community/gpt2{NO_NETWORK}"):
        prepare(config, quiet)


def test_missing_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"--data.source fineweb needs .*requirements/fineweb\.txt"):
        prepare(DataConfig(source="fineweb"), quiet)
