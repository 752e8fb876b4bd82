"""Many files tokenized in many processes."""

import json
import shutil

import numpy as np
import pytest

from examples import data
from examples.train import main
from examples.trainer.data import token_folder, tokenize_files, tokenizer
from examples.trainer.data.hub import is_held_out
from examples.trainer.data.prepare import prepare
from examples.trainer.data.token_folder import Writer
from examples.trainer.settings.run import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import losses, on_devices, quiet, train

pytestmark = pytest.mark.usefixtures("one_device")


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


def test_all_documents_are_there_once_whatever_the_workers(files):
    assert prepared(files, "--workers", "2") == 0
    found = opened(files)
    texts = [text for number in range(3) for text in sentences(number)]
    for tokens, held_out in ((found.train, False), (found.val, True)):
        own = [text for text in texts if is_held_out(text, 0.2) == held_out]
        decoded = found.tokenizer.decode(tokens.ids[:].tolist(), skip_special_tokens=False)
        assert sorted(decoded.split(tokenizer.END)[1:]) == sorted(own)
        assert tokens.bytes == sum(map(len, own))
    assert prepared(files, out="one") == 0
    one = opened(files, "one")
    assert one.key == found.key
    np.testing.assert_array_equal(one.train.ids[:], found.train.ids[:])


def test_parts_are_prepared_apart_and_the_last_one_names_all(files, capsys):
    for number in (2, 3):
        assert prepared(files, "--part", f"{number}/3") == 0
        assert "are left to other parts" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no parts\.json"):
        opened(files)
    assert prepared(files, "--part", "1/3") == 0
    assert "complete" in capsys.readouterr().out
    assert prepared(files, out="one") == 0
    assert opened(files).key == opened(files, "one").key


def test_a_stop_loses_no_file_that_was_complete(files, capsys):
    assert prepared(files) == 0
    parts = sorted((files.parent / "out" / "parts").iterdir())
    before = [part.stat().st_mtime_ns for part in parts]
    (parts[1] / "index.json").unlink()  # written last, so that a stop leaves none
    assert prepared(files) == 0
    assert "1 of 3 files to tokenize" in capsys.readouterr().out
    after = [part.stat().st_mtime_ns for part in parts]
    assert [a != b for a, b in zip(after, before, strict=True)] == [False, True, False]


def test_a_file_is_not_held_in_memory(files, monkeypatch):
    assert prepared(files) == 0
    flush, most = Writer.flush, []

    def count(self, *splits):
        most.append(max(self.size.values()))
        flush(self, *splits)

    monkeypatch.setattr(Writer, "flush", count)
    monkeypatch.setattr(token_folder, "SHARD_TOKENS", 500)
    shutil.rmtree(files.parent / "out" / "parts")
    asked = tokenize_files.Preparation(
        files.parent / "out", (str(files),), str(files.parent / "tokenizer.json"), val_fraction=0.2
    )
    for name, path in tokenize_files.named(asked.paths).items():
        tokenize_files.tokenize(asked, name, path)
    assert len(most) > 6 and max(most) < 700


def test_a_run_trains_on_what_was_prepared(files, tmp_path):
    assert prepared(files) == 0
    flags = ["--data.source", "prepared", "--name", "x", "--eval-batches", "1"]
    with on_devices(1):
        assert train(files.parent / "out", tmp_path, *flags) == 0
        assert main(["--resume", str(tmp_path / "x")]) == 0
    assert min(losses(tmp_path / "x").values()) < 6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--part", "0/3"], "--part 0/3"),
        (["--part", "4/3"], "--part 4/3"),
        (["--part", "x"], "--part x"),
        (["--workers", "0"], "--workers is 0"),
        (["--text-field", "body"], "has no field 'body'"),
    ],
)
def test_what_cannot_be_prepared_is_refused(files, flags, words, capsys):
    assert prepared(files, *flags) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_a_folder_has_one_tokenizer(files, capsys):
    assert prepared(files) == 0
    words = files.parent / "tokenizer.json"
    tokenizer.train(sentences(1), 300).save(str(words))
    assert prepared(files) == 2
    assert "was prepared with another tokenizer" in capsys.readouterr().err


def test_another_split_is_made_of_all_files(files, capsys):
    assert prepared(files) == 0
    before = opened(files).val.size
    assert prepared(files, "--val-fraction", "0.4") == 0
    assert "3 of 3 files to tokenize" in capsys.readouterr().out
    assert opened(files).val.size > before


def test_names_of_parts_stay_inside(files):
    assert prepared(files) == 0
    path = files.parent / "out" / token_folder.PARTS
    path.write_text(json.dumps(["../../elsewhere"]))
    with pytest.raises(UserError, match=r"out/parts/elsewhere/index\.json.*there is none"):
        opened(files)
    path.write_text('{"a": 1}')
    with pytest.raises(UserError, match="names no parts"):
        opened(files)


def test_a_folder_that_no_run_could_read_is_refused(files, capsys):
    (files / "0.jsonl").rename(files / "0.txt")
    (files / "0.txt").write_text("plain text is one document\n" * 99)
    given = ["--paths", str(files / "0.txt"), "--val-fraction"]
    for split, fraction in (("val", "0.001"), ("train", "0.999")):
        assert prepared(files, *given, fraction, out=split) == 2
        said = capsys.readouterr()
        assert "complete" not in said.out and f"is {split} text" in said.err
        metas = [
            token_folder.read_index(each) for each in (files.parent / split / "parts").iterdir()
        ]
        assert not any(getattr(meta, split) for meta in metas)
        names = [each.name for each in (files.parent / split / "parts").iterdir()]
        (files.parent / split / token_folder.PARTS).write_text(
            json.dumps(names)
        )  # by an older version
        with pytest.raises(UserError, match=f"{split} has no {split} text"):
            opened(files, split)


def test_a_file_that_was_written_again_is_tokenized_again(files, capsys):
    assert prepared(files) == 0
    before = opened(files).key
    path = files / "1.jsonl"
    path.write_text(path.read_text().replace("word1", "word2"))  # as many bytes
    assert prepared(files) == 0
    assert "1 of 3 files to tokenize" in capsys.readouterr().out
    assert opened(files).key != before
    assert prepared(files, out="new") == 0
    assert opened(files).key == opened(files, "new").key


# Several processes


def test_processes_do_not_wait_while_one_makes_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"examples\.data --source fineweb --tokens 5e"):
        prepare(DataConfig(source="fineweb", tokens=5e8), quiet, stream=False)
