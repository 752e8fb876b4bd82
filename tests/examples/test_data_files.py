"""From files to documents, their split, and the cache of tokens."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.data import main
from examples.trainer.data import corpus, token_folder
from examples.trainer.data.prepare import prepare
from examples.trainer.settings import validation
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet


def read(*paths, say=quiet, **options):
    return corpus.read(DataConfig(paths=tuple(map(str, paths)), **options), say)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(count):
    return [f"document {i} is naïve\n" * (i % 7 + 3) for i in range(count)]


def test_each_line_is_a_document(tmp_path):
    texts = documents(60)
    write_rows(tmp_path / "a.jsonl", [{"id": i, "text": t} for i, t in enumerate(texts[:40])])
    lines = [json.dumps({"text": t}) for t in [*texts[40:], None]]
    (tmp_path / "B.NDJSON").write_text("\n\n".join(lines) + "\n  \n")
    (tmp_path / "c.md").write_text("and a file of plain text")
    assert set(read(tmp_path, val_fraction=0.5)) == {*texts, "and a file of plain text"}
    path = write_rows(tmp_path / "a.jsonl", [{"body": t} for t in texts[:40]])
    assert set(read(path, text_field="body", val_fraction=0.5)) == set(texts[:40])


def test_byte_limit_counts_the_bytes_of_text_and_splits_no_character(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": c * 10, "id": "long" * 99} for c in "éaz"])
    for limit, expected in ((25, {"é" * 10, "a" * 5}), (15, {"é" * 7})):
        assert set(read(path, max_bytes=limit, val_fraction=0.9)) == expected


def test_byte_limit_takes_the_same_files_in_whatever_order_the_disk_has_them(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name * 99)
    expected, search = read(tmp_path, max_bytes=99, val_fraction=0.9), Path.rglob
    for order in (sorted, reversed):
        monkeypatch.setattr(Path, "rglob", lambda *args, order=order: order([*search(*args)]))
        assert read(tmp_path, max_bytes=99, val_fraction=0.9) == expected


def test_copies_are_left_out_and_said(tmp_path):
    """Also rows that are repeated on purpose: a reader has to know that they count once."""
    said = []
    rows = [{"text": text} for text in documents(30)] * 40
    read(write_rows(tmp_path / "a.jsonl", rows), max_bytes=10**7, say=said.append)
    size = sum(len(row["text"].encode()) for row in rows)
    assert said == [f"{size * 39 // 40:,} bytes are copies of other documents, and are left out."]
    assert read(write_rows(tmp_path / "a.jsonl", rows[:30]), say=said.append) and len(said) == 1


LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents(30)))
REFUSED = {
    "a.jsonl": {
        '{"text": "a"}\n{"text": ': r"a\.jsonl, line 2 is not JSON",
        '\n{"id": 1, "body": "b"}': r"a\.jsonl, line 2 has no field 'text', but id, body: name",
        '["text"]': r"a\.jsonl, line 1 has no field 'text', but a list",
        '{"text": 12}': r"a\.jsonl, line 1 has no text in 'text', but 12",
        '{"text": "\\ud800"}': r"a\.jsonl, line 1 has no text in 'text'",
        '{"text": ' + "[" * 100_000: r"a\.jsonl, line 1 is not JSON",
        '{"text": "\xff"}': r"a\.jsonl, line 1 is not JSON .*utf-8",
        "": r"no text in .*: give files that are not empty",
        '{"text": ""}\n{"text": null}': r"no text in .*: give files that are not empty",
    },
    "a.TXT": {LINES: "is no plain text, but JSON", LINES[:-40]: "but JSON or a table"},
    "bom.text": {"\xef\xbb\xbf" + LINES: "is no plain text, but JSON"},
    "no_suffix": {LINES: r"has to end in \.jsonl"},
    "B.JSON": {"[1]": "write it as .jsonl"},
    "a.CSV": {"id,text\n0,document\n": "is no plain text"},
    "a.txt": {
        "\x1f\x8b\x08 packed": "is not UTF-8 text",
        "a\0b\0c\0": "holds zero bytes, as UTF-16",
        "\xff\xfea\0": "is not UTF-8 text",
    },
}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases.items()],
)
def test_what_is_no_text_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=said):
        read(tmp_path / name)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        read("nowhere")
    with pytest.raises(UserError, match="does not exist"):
        read("a\0b", "\ud800")
    with pytest.raises(UserError, match=r"holds no \.txt, \.md"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt is no regular file"):
        read(tmp_path / "pipe.txt")


@pytest.mark.parametrize("wrong", ["a\0b", "\ud800"])
def test_settings_that_no_file_can_be_named_by_are_refused(wrong):
    for config in (RunConfig(name=wrong), RunConfig(data=DataConfig(paths=(wrong,)))):
        with pytest.raises(UserError, match=r"has a zero byte|that is not UTF-8"):
            validation.check(config)


def test_text_can_be_made_ready_without_training(text, capsys):
    assert main(["--paths", str(text), "--vocab-size", "320"]) == 0
    assert "320 in the vocabulary" in capsys.readouterr().out
    assert main(["--paths", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere does not exist")
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


def test_split_of_one_file_has_the_wanted_share(text):
    train, val = corpus.split(read(text), 0.05)
    size = sum(map(len, val))
    assert 0.05 <= size / (size + sum(map(len, train))) < 0.065
    with pytest.raises(UserError, match="too little text: 3 characters"):
        corpus.split(["abc"], 0.5)


DAMAGES = {
    "cut off": ("train-00000.bin", lambda content: content[:-2]),
    "one bit": (
        "train-00000.bin",
        lambda content: content[:-2] + bytes([content[-2] ^ 1]) + content[-1:],
    ),
    "zeros": ("val-00000.bin", lambda content: bytes(len(content))),
    "tokenizer": ("tokenizer.json", lambda content: content[1:]),
    "index": ("index.json", lambda content: b"{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again_and_read(text, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, said = DataConfig(paths=(str(text),), vocab_size=310), []
    first = prepare(config, said.append)
    ids = np.array(first.train.ids[:])
    assert len(said) == 2
    assert prepare(config, said.append).key == first.key and len(said) == 2
    [folder] = [path.parent for path in tmp_path.rglob("index.json")]
    name, change = DAMAGES[damage]
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    for _ in range(2):  # in the process that has read the damaged file, and once more
        repaired = prepare(config, said.append)
        assert f"{folder}/{name}" in said[2] and len(said) == 5
        np.testing.assert_array_equal(repaired.train.ids[:], ids)


def test_files_with_a_given_tokenizer(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = prepare(DataConfig(paths=(str(text),), vocab_size=300), quiet)
    first.tokenizer.save(str(tmp_path / "t.json"))
    config = DataConfig(paths=(str(text),), tokenizer=str(tmp_path / "t.json"))
    again = prepare(config, quiet)
    assert again.key == first.key and len([*tmp_path.rglob(token_folder.INDEX)]) == 2
    decoded = again.tokenizer.decode(again.train.ids[:].tolist(), skip_special_tokens=False)
    train, _ = corpus.split(read(text), config.val_fraction)
    assert decoded == "".join("<|endoftext|>" + document for document in train)
    size = sum(len(document.encode()) for document in read(text))
    assert again.train.meta.bytes + again.val.meta.bytes == size
    assert Tokenizer.from_str(again.tokenizer.to_str()).get_vocab_size() == 300
