"""From files to documents, their split, and the cache of tokens."""

import json
import os
import shutil

import pytest

from examples.data import main
from examples.trainer.data import corpus
from examples.trainer.data import prepare as preparation
from examples.trainer.data.prepare import prepare
from examples.trainer.settings import validation
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet


def read(*paths, **options):
    return corpus.read(DataConfig(paths=tuple(map(str, paths)), **options))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(count):
    return [f"document {i} is naïve\n" * (i % 7 + 3) for i in range(count)]


def test_each_line_is_a_document_and_copies_count_once(tmp_path):
    texts = documents(60)
    write_rows(tmp_path / "a.jsonl", [{"id": i, "text": t} for i, t in enumerate(texts[:40])])
    lines = [json.dumps({"text": t}) for t in texts[30:]]
    (tmp_path / "B.NDJSON").write_text("\n\n".join(lines) + "\n  \n")
    (tmp_path / "c.md").write_text("and a file of plain text")
    assert sorted(read(tmp_path, val_fraction=0.5)) == sorted([*texts, "and a file of plain text"])
    path = write_rows(tmp_path / "a.jsonl", [{"body": t} for t in texts[:40]])
    assert set(read(path, text_field="body", val_fraction=0.5)) == set(texts[:40])


def test_byte_limit_counts_the_bytes_of_text_and_splits_no_character(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": c * 10, "id": "long" * 99} for c in "éaz"])
    for limit, expected in ((25, {"é" * 10, "a" * 5}), (15, {"é" * 7})):
        assert set(read(path, max_bytes=limit, val_fraction=0.9)) == expected
    (tmp_path / "b.txt").write_text("é" * 10)
    assert read(tmp_path / "b.txt", max_bytes=15, val_fraction=0.9) == ["é" * 7]


def test_a_text_above_the_limit_is_said_to_be_cut(tmp_path):
    said, (path, other) = [], (tmp_path / "a.txt", tmp_path / "b.txt")
    path.write_text("word " * 100)
    other.write_text("more " * 100)
    for limit, expected in ((1000, []), (999, ["read 999 bytes of text, from files of 1,000 by"])):
        corpus.read(DataConfig(paths=(str(path), str(other)), max_bytes=limit), said.append)
        assert [line[: len(expected[0])] for line in said] == expected if expected else not said


def test_no_more_of_a_file_is_read_than_there_is_room_for(tmp_path, monkeypatch):
    asked, texts = [], corpus.texts
    monkeypatch.setattr(corpus, "texts", lambda *a: asked.append(a[1]) or texts(*a))
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(letter * 60)
    assert sum(map(len, read(tmp_path, max_bytes=100, val_fraction=0.9))) == 100
    assert asked == [101, 41]  # one more than the room, to notice the end


def test_rows_are_read_whatever_the_file_is_named(tmp_path):
    texts = documents(40)
    for name in ("c4-train.00000-of-00002.json", "a.jsonlines", "A.JSONL"):
        path = write_rows(tmp_path / name, [{"text": t, "url": "u"} for t in texts])
        assert sorted(read(path, val_fraction=0.9)) == sorted(texts)
    (tmp_path / "array.json").write_text(json.dumps([{"text": t} for t in texts], indent=1))
    with pytest.raises(UserError, match=r"line 1 is no JSON object .* write one object a line"):
        read(tmp_path / "array.json")
    for name in ("a.csv", "B.TSV", "c.parquet"):
        (tmp_path / name).write_text("id,text\n1,a word\n")
        with pytest.raises(UserError, match=r"is a table, not text: write its texts to a .jsonl"):
            read(tmp_path / name)


def test_the_mark_between_documents_is_not_text(tmp_path):
    texts = documents(20)
    (tmp_path / "stories.txt").write_text("<|endoftext|>\n".join(["", *texts, ""]))
    write_rows(tmp_path / "a.jsonl", [{"text": "one<|endoftext|>two"}])
    found = read(tmp_path, val_fraction=0.9)
    assert sorted(x.strip() for x in found) == sorted(x.strip() for x in [*texts, "one", "two"])


REFUSED = {
    b'{"text": "a"}\n{"text": ': r"a\.jsonl, line 2 is no JSON object",
    b'\n{"id": 1, "body": "b"}': r"line 2 is .* with a text in 'text' \(KeyError.*--data\.text-f",
    b'{"text": 12}': r"line 1 is .* \(AttributeError",
}


@pytest.mark.parametrize(("content", "said"), REFUSED.items())
def test_a_row_without_text_is_named(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read(tmp_path / "a.jsonl")


def test_files_that_are_no_text_are_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\x1f\x8b\x08 packed")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt is no regular file"):
        read(tmp_path / "pipe.txt")
    (tmp_path / "empty").mkdir()
    assert main(["--paths", str(tmp_path / "empty")]) == 2
    assert "too little text: 0 characters" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["a\0b", "\ud800"])
def test_settings_that_no_file_can_be_named_by_are_refused(wrong):
    for config in (RunConfig(name=wrong), RunConfig(data=DataConfig(paths=(wrong,)))):
        with pytest.raises(UserError, match=r"has a zero byte|that is not UTF-8"):
            validation.check(config)


def test_text_can_be_made_ready_without_training(text, capsys):
    assert main(["--paths", str(text), "--vocab-size", "320"]) == 0
    assert "320 in the vocabulary" in capsys.readouterr().out
    assert main(["--vocab-size", "3"]) == 2


def test_standard_library_is_the_default():
    found = read(max_bytes=200_000)
    assert 100_000 < sum(len(document.encode()) for document in found) <= 200_000
    names = {path.as_posix() for path in corpus.standard_library()}
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name for name in names)


def test_validation_split_depends_on_content_only(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.md").write_text(f"document {i} " * 50)
    (tmp_path / "copy.md").write_bytes((tmp_path / "7.md").read_bytes())
    train, val = corpus.split(read(tmp_path, val_fraction=0.2), 0.2)
    assert len(val) in (8, 9) and len(train) + len(val) == len({*train, *val}) == 40
    for i in range(40):  # other names, same content
        (tmp_path / f"{i}.md").rename(tmp_path / f"{99 - i}.txt")
    assert corpus.split(read(tmp_path, val_fraction=0.2), 0.2) == (train, val)


@pytest.mark.parametrize("text", ["word " * 9000, "x" * 50_000, "a line\n" * 7000, "é" * 30_000])
def test_pieces_join_to_the_text(text):
    pieces = list(corpus.cut(text, 8000))
    assert "".join(pieces) == text
    assert min(map(len, pieces[:-1])) > 4000 and max(map(len, pieces)) <= 8000


DAMAGES = {
    "one bit": ("train.bin", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "removed": ("val.bin", None),
    "tokenizer": ("tokenizer.json", lambda content: content.replace(b"true", b"false")),
    "index": ("index.json", lambda content: b"{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_named(text, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, said = DataConfig(paths=(str(text),), vocab_size=310), []
    key = prepare(config, said.append).key
    assert len(said) == 2
    assert prepare(config, said.append).key == key and len(said) == 2
    [folder] = [path.parent for path in tmp_path.rglob("index.json")]
    name, change = DAMAGES[damage]
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if change:
        (folder / name).write_bytes(change(content))
    with pytest.raises(UserError, match=f"{folder}/{name} is not as written: remove its folder"):
        prepare(config, quiet)
    shutil.rmtree(folder)
    assert prepare(config, quiet).key == key


def test_a_cache_that_was_stopped_is_not_read_as_whole(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(paths=(str(text),), vocab_size=310)
    whole = prepare(config, quiet)
    [path] = tmp_path.rglob("index.json")
    preparation.write_index(path.parent, preparation.read_index(path.parent) | {"complete": False})
    assert prepare(config, quiet).key == whole.key


@pytest.mark.parametrize("name", ["index.json", "tokenizer.json", "train.bin"])
def test_pipes_in_the_cache_do_not_hang(text, tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(paths=(str(text),), vocab_size=310)
    prepare(config, quiet)
    [path] = tmp_path.rglob(name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"{name} is no regular file"):
        prepare(config, quiet)


def test_files_with_a_given_tokenizer(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = prepare(DataConfig(paths=(str(text),), vocab_size=300), quiet)
    first.tokenizer.save(str(tmp_path / "t.json"))
    config = DataConfig(paths=(str(text),), tokenizer=str(tmp_path / "t.json"))
    again = prepare(config, quiet)
    assert again.key == first.key and len([*tmp_path.rglob("index.json")]) == 2
    decoded = again.tokenizer.decode(again.train.ids[:].tolist(), skip_special_tokens=False)
    train, _ = corpus.split(read(text), config.val_fraction)
    assert decoded == "".join("<|endoftext|>" + document for document in train)
    size = sum(len(document.encode()) for document in read(text))
    assert again.train.bytes + again.val.bytes == size


def test_copies_of_documents_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [json.dumps({"text": f"Row {i}: {i * i} foxes sleep."}) for i in range(99)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows * 3))
    said = []
    prepare(DataConfig(paths=(str(tmp_path / "rows.jsonl"),), vocab_size=300), said.append)
    assert any("bytes are copies of other documents" in line for line in said)
