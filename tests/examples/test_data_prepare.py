"""Many files, each of which is tokenized once."""

import json
import os

import numpy as np
import pytest

from examples import data
from examples.trainer.data import prepare as preparation
from examples.trainer.data import token_folder, tokenizer
from examples.trainer.data.corpus import split_by
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet


def sentences(number):
    """Documents of a file."""
    words = np.random.default_rng(number).integers(1000, size=(60, 12))
    return [" ".join(f"word{i}" for i in row) for row in words]


@pytest.fixture
def files(tmp_path):
    """Three .jsonl files and a tokenizer."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in sentences(number)]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    made = tokenizer.train((text for i in range(3) for text in sentences(i)), 400)
    made.save(str(tmp_path / "tokenizer.json"))
    return folder


def prepared(files, *flags, out="out"):
    """The exit status of a preparation."""
    given = ["--out", str(files.parent / out), "--paths", str(files), "--val-fraction", "0.2"]
    given += ["--tokenizer", str(files.parent / "tokenizer.json")]
    return data.main(["prepare", *given, *flags])


def opened(files, out="out"):
    """The text that was prepared."""
    return prepare(DataConfig(source="prepared", paths=(str(files.parent / out),)), quiet)


def test_all_documents_are_there_once(files):
    assert prepared(files) == 0
    found = opened(files)
    texts = [text for number in range(3) for text in sentences(number)]
    for tokens, held_out in ((found.train, False), (found.val, True)):
        own = [text for text in texts if (split_by(0.2)(text) == "val") == held_out]
        decoded = found.tokenizer.decode(tokens.ids[:].tolist(), skip_special_tokens=False)
        assert sorted(decoded.split(tokenizer.END)[1:]) == sorted(own)
        assert tokens.meta.bytes == sum(map(len, own))
    assert prepared(files, out="one") == 0
    one = opened(files, "one")
    assert one.key == found.key
    np.testing.assert_array_equal(one.train.ids[:], found.train.ids[:])


def test_a_part_that_was_stopped_is_not_read_as_whole(files, monkeypatch):
    """A source that was touched is tokenized again; a kill leaves the beginning of its part."""
    assert prepared(files) == 0
    whole = opened(files).train.meta.tokens
    (files / "1.jsonl").touch()
    out = files.parent / "out"
    [part] = out.glob("parts/1-*")
    index = json.loads((part / "index.json").read_text())
    index["index"]["complete"] = False
    (part / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"parts/1-\S+ is not complete: prepare it to its end"):
        opened(files)
    monkeypatch.setattr(preparation, "tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preparation.prepare_parts(asked(files), quiet)
    with pytest.raises(UserError, match=r"no parts\.json"):
        opened(files)
    monkeypatch.undo()
    assert prepared(files) == 0 and opened(files).train.meta.tokens == whole


def asked(files, val_fraction=0.2):
    words = str(files.parent / "tokenizer.json")
    out = files.parent / "out"
    return preparation.Preparation(out, (str(files),), words, val_fraction=val_fraction)


def interrupted(*given):
    raise KeyboardInterrupt


def test_names_that_are_no_utf8_and_dots_are_parts(files):
    os.rename(files / "0.jsonl", os.fsencode(files) + b"/\xff.jsonl")
    (files / "1.jsonl").rename(files / "...jsonl")
    assert prepared(files) == 0
    assert opened(files).train.meta.tokens > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--val-fraction", "1"], "--val-fraction is 1"),
        (["--text-field", "body"], "has no field 'body'"),
    ],
)
def test_what_cannot_be_prepared_is_refused(files, flags, words, capsys):
    assert prepared(files, *flags) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_a_file_is_tokenized_again_only_if_it_or_the_split_has_changed(files, capsys):
    assert prepared(files) == 0
    parts = sorted((files.parent / "out" / "parts").iterdir())
    before, key = [part.stat().st_mtime_ns for part in parts], opened(files).key
    (parts[1] / "index.json").unlink()  # written last, so that a stop leaves none
    assert prepared(files) == 0
    assert "1 of 3 files to tokenize" in capsys.readouterr().out
    after = [part.stat().st_mtime_ns for part in parts]
    assert [a != b for a, b in zip(after, before, strict=True)] == [False, True, False]
    assert opened(files).key == key
    path = files / "1.jsonl"
    path.write_text(path.read_text().replace("word1", "word2"))  # as many bytes
    assert prepared(files) == 0
    assert "1 of 3 files to tokenize" in capsys.readouterr().out
    assert opened(files).key != key and prepared(files, out="new") == 0
    assert opened(files).key == opened(files, "new").key
    size = opened(files).val.meta.tokens
    assert prepared(files, "--val-fraction", "0.4") == 0
    assert (
        "3 of 3 files to tokenize" in capsys.readouterr().out
        and opened(files).val.meta.tokens > size
    )
    tokenizer.train(sentences(1), 300).save(str(files.parent / "tokenizer.json"))
    assert prepared(files) == 2
    assert "was prepared with another tokenizer" in capsys.readouterr().err


def test_a_file_is_not_held_in_memory(files, monkeypatch):
    assert prepared(files) == 0  # so that the folder has the tokenizer, and parts of another split
    flush, waiting = token_folder.Writer.flush, []

    def count(self, *splits):
        waiting.append(max(self.size.values()))
        flush(self, *splits)

    monkeypatch.setattr(token_folder.Writer, "flush", count)
    monkeypatch.setattr(token_folder, "SHARD_TOKENS", 500)
    for path in files.iterdir():
        preparation.tokenize(asked(files, 0.3), preparation.part_of(path), path)
    assert len(waiting) > 6 and max(waiting) < 700


def test_names_of_parts_stay_inside(files):
    assert prepared(files) == 0
    path = files.parent / "out" / token_folder.PARTS
    [one, *_] = json.loads(path.read_text())
    for names, said in [
        (["../../elsewhere"], "names no parts"),
        (["."], "names no parts"),
        (["a\0b"], "names no parts"),
        (["\ud800"], "names no parts"),
        ({"a": 1}, "names no parts"),
        ([one, one], "names a part twice"),
        (["elsewhere"], r"parts/elsewhere/index\.json.*there is none"),
    ]:
        path.write_text(json.dumps(names))
        with pytest.raises(UserError, match=said):
            opened(files)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is no regular file"):
        opened(files)


def test_a_folder_that_no_run_could_read_is_refused(files, capsys):
    (files / "0.jsonl").rename(files / "0.txt")
    (files / "0.txt").write_text("plain text is one document\n" * 99)
    given = ["--paths", str(files / "0.txt"), "--val-fraction"]
    for split, fraction in (("val", "0.001"), ("train", "0.999")):
        assert prepared(files, *given, fraction, out=split) == 2
        said = capsys.readouterr()
        assert "complete" not in said.out and f"is {split} text" in said.err
