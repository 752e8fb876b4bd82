"""Any dataset of the hub, from folders on this disk, which `datasets` reads in the same way."""

import json
import sys
import types

import numpy as np
import pytest
from datasets.exceptions import DatasetNotFoundError

from examples import data
from examples.trainer.data import tokenizer
from examples.trainer.data.hub import is_held_out
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import DataConfig
from examples.trainer.system.errors import UserError
from tests.support import texts
from tests.support.trainer import quiet

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
        assert part.bytes == sum(map(len, expected))


def test_so_many_tokens_are_taken_and_found_again(root, monkeypatch):
    said = []
    found = opened(root, "plain", said.append, tokens=1000)
    assert 1000 <= found.train.size < 1200
    assert "/plain to 1,000 training tokens" in said[0]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert opened(root, "plain", tokens=1000).key == found.key
    with pytest.raises(UserError, match=r"--data.hub .* needs the package datasets .*fineweb\.txt"):
        opened(root, "plain", tokens=1001)


def test_the_command_prepares_it(root, capsys):
    given = ["--hub", f"{root}/plain", "--tokenizer", f"{root}/tokenizer.json"]
    assert data.main([*given, "--val-fraction", "0.3"]) == 0
    found = opened(root, "plain")
    assert f"{found.train.size:,} training" in capsys.readouterr().out
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
