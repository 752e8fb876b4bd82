"""Datasets of the hub: FineWeb from a stream, others from folders, which are read likewise."""

import contextlib
import json
import shutil
import sys
import types

import datasets
import numpy as np
import pyarrow
import pytest
from datasets.exceptions import DatasetNotFoundError
from pyarrow import parquet
from tokenizers import Tokenizer

from examples import data
from examples.trainer.data import hub, token_folder, tokenizer
from examples.trainer.data.hub import is_held_out
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support import texts
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
    assert 20_000 <= dataset.train.meta.tokens < 20_200
    assert len(list(tmp_path.rglob("train-*.bin"))) > 3
    decoded = [
        dataset.tokenizer.decode(part.ids[:].tolist(), skip_special_tokens=False).split(
            tokenizer.END
        )[1:]
        for part in (dataset.train, dataset.val)
    ]
    train, val = decoded
    read = ROWS[: len(train) + len(val)]
    assert val == [row for row in read if hub.is_held_out(row, 0.2)]
    assert 0.14 < len(val) / len(read) < 0.26
    assert train == [row for row in read if not hub.is_held_out(row, 0.2)]
    for part, rows in ((dataset.train, train), (dataset.val, val)):
        assert part.meta.bytes == sum(len(row.encode()) for row in rows)
    assert "20,000 training tokens, from 0" in said[0] and "tokens" in said[-1]
    monkeypatch.setattr(hub, "open_stream", refuse)
    assert prepare(config, quiet).key == dataset.key


def test_an_interrupted_stream_of_the_package_goes_on(config, monkeypatch, tmp_path):
    whole = prepare(config, quiet)
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
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("second/**/train-*.bin")}
    assert kept
    serve(monkeypatch, local())
    said = []
    again = prepare(config, said.append)
    assert again.key == whole.key and "from 0;" not in said[0]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
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
    assert "ends after" in said[-1] and 0 < dataset.train.meta.tokens < 20_000
    assert prepare(config, refuse).key == dataset.key


def hub_without_network(*args, **kwargs):
    raise ConnectionError("Couldn't reach 'HuggingFaceFW/fineweb' on the Hub")


def test_missing_network_is_reported_with_alternatives(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"reads no --data\.paths"):
        prepare(DataConfig(source="fineweb", paths=("a.txt",)), quiet)
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


# Any dataset


CONFIGS = """---
configs:
- config_name: one
  data_files: one.jsonl
- config_name: two
  data_files:
  - split: extra
    path: two.jsonl
---
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Datasets of one kind of rows, and one with two configurations."""
    root = tmp_path_factory.mktemp("hub")
    texts.make_tokenizer(root / "tokenizer.json")
    texts.as_on_the_hub(root / "plain", 0)
    texts.as_on_the_hub(root / "content", 0, "content")
    texts.as_on_the_hub(root / "both", 0).joinpath("README.md").write_text(CONFIGS)
    for number, name in enumerate(("one", "two")):
        rows = [json.dumps({"text": text}) + "\n" for text in texts.documents(number)]
        (root / "both" / f"{name}.jsonl").write_text("".join(rows))
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is there from another test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(root, name, say=quiet, **changes):
    words = str(root / "tokenizer.json")
    given = {"tokenizer": words, "val_fraction": 0.3, "hub": f"{root}/{name}", **changes}
    return prepare(DataConfig(**given), say)


@pytest.mark.parametrize(
    ("hub", "seed", "changes"),
    [
        ("plain", 0, {}),
        ("plain:default:train", 0, {}),
        ("content", 0, {}),  # the only column that holds text
        ("content", 0, {"text_field": "content"}),
        ("both:one", 0, {}),
        ("both:two:extra", 1, {}),
    ],
)
def test_all_documents_are_there(root, hub, seed, changes):
    found = opened(root, hub, **changes)
    for part, held_out in ((found.train, False), (found.val, True)):
        decoded = found.tokenizer.decode(part.ids[:].tolist(), skip_special_tokens=False)
        expected = [text for text in texts.documents(seed) if is_held_out(text, 0.3) == held_out]
        assert decoded.split(tokenizer.END)[1:] == expected
        assert part.meta.bytes == sum(map(len, expected))


def test_so_many_tokens_are_taken_and_found_again(root, monkeypatch):
    said = []
    found = opened(root, "plain", said.append, tokens=1000)
    assert 1000 <= found.train.meta.tokens < 1200
    assert "/plain to 1,000 training tokens" in said[0]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert opened(root, "plain", tokens=1000).key == found.key
    with pytest.raises(UserError, match=r"--data.hub .* needs the package datasets .*fineweb\.txt"):
        opened(root, "plain", tokens=1001)


def test_the_command_prepares_it(root, capsys):
    given = ["--hub", f"{root}/plain", "--tokenizer", f"{root}/tokenizer.json"]
    assert data.main([*given, "--val-fraction", "0.3"]) == 0
    found = opened(root, "plain")
    assert f"{found.train.meta.tokens:,} training" in capsys.readouterr().out
    np.testing.assert_array_equal(opened(root, "plain", verify=True).val.ids[:], found.val.ids[:])


@pytest.mark.parametrize(
    ("hub", "changes", "said"),
    [
        ("both", {}, r"Config name is missing\. .*\['one', 'two'\]"),
        ("both:three", {}, r"'three' not found\. Available: \['one', 'two'\]"),
        ("both:two", {}, r"Bad split: train\. Available splits: \['extra'\]"),
        ("plain::train[:10%]", {}, "Bad split: train"),
        ("nowhere", {}, "Couldn't find any data file at .*nowhere"),
        ("plain", {"text_field": "body"}, "has no field 'body', but id, text: .*--data.text-field"),
        ("plain", {"hub": ":x"}, "--data.hub :x: give NAME, NAME:CONFIG or"),
        ("plain", {"paths": ("a",)}, "--data.hub reads no --data.paths"),
    ],
)
def test_what_is_not_there_is_named(root, hub, changes, said):
    with pytest.raises(UserError, match=said):
        opened(root, hub, **changes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the split train is empty"),
        ('{"text": 3}\n', "row 1 of .* has no text in 'text', but '3'"),
        ('{"text": ""}\n{"text": null}\n', "has no text in 'text': give another"),
        ('{"q": "a", "a": "b"}\n', "has no field 'text', but q, a"),
        ('{"text": "a"\n', "cannot get .*: JSON parse error"),
    ],
)
def test_rows_without_text_are_refused(root, tmp_path, content, said):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=said):
        opened(root, "", hub=str(tmp_path / "rows"))


def test_an_unknown_name_is_reported(root, monkeypatch):
    def load_dataset(path, **given):
        raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"cannot get no/thing:a .*'no/thing' doesn't exist"):
        opened(root, "", hub="no/thing:a")


def test_processes_do_not_wait_while_one_makes_tokens(root):
    config = DataConfig(hub="a/b:c", text_field="body", tokenizer=str(root / "tokenizer.json"))
    with pytest.raises(UserError, match=r"examples\.data --hub a/b:c --text-field body --tokens"):
        prepare(config, quiet, stream=False)
