"""From files to documents, their split, tokenizers by name, and the cache of tokens."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, normalizers, processors
from tokenizers import models as tokenizer_models

from examples.data import main
from examples.trainer.data import corpus, tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(count):
    return [f"document {i} is naïve\n" * (i % 7 + 3) for i in range(count)]


def test_each_line_is_a_document(tmp_path):
    texts = documents(60)
    write_rows(tmp_path / "a.jsonl", [{"id": i, "text": t} for i, t in enumerate(texts[:40])])
    lines = [json.dumps({"text": t}) for t in [*texts[40:], None]]
    (tmp_path / "b.jsonl").write_text("\n\n".join(lines) + "\n  \n")
    (tmp_path / "c.md").write_text("and a file of plain text")
    config = DataConfig(paths=(str(tmp_path),), val_fraction=0.5)
    assert set(corpus.read(config)) == {*texts, "and a file of plain text"}
    write_rows(tmp_path / "a.jsonl", [{"body": t} for t in texts[:40]])
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), text_field="body", val_fraction=0.5)
    assert set(corpus.read(config)) == set(texts[:40])


def test_byte_limit_counts_the_bytes_of_text_and_splits_no_character(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": c * 10, "id": "long" * 99} for c in "éaz"])
    for limit, expected in ((25, {"é" * 10, "a" * 5}), (15, {"é" * 7})):
        config = DataConfig(paths=(str(path),), max_bytes=limit, val_fraction=0.9)
        assert set(corpus.read(config)) == expected


def test_byte_limit_takes_the_same_files_in_whatever_order_the_disk_has_them(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name * 99)
    config = DataConfig(paths=(str(tmp_path),), max_bytes=99, val_fraction=0.9)
    expected, search = corpus.read(config), Path.rglob
    for order in (sorted, reversed):
        monkeypatch.setattr(Path, "rglob", lambda *args, order=order: order([*search(*args)]))
        assert corpus.read(config) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    {
        b'{"text": "a"}\n{"text": ': r"a\.jsonl, line 2 is not JSON",
        b'\n{"id": 1, "body": "b"}': r"a\.jsonl, line 2 has no field 'text', but id, body: name",
        b'["text"]': r"a\.jsonl, line 1 has no field 'text', but a list",
        b'{"text": 12}': r"a\.jsonl, line 1 has no text in 'text', but '12'",
        b'{"text": "\\ud800"}': r"a\.jsonl, line 1 is not text that UTF-8 can write",
        b'{"text": ' + b"[" * 100_000: r"a\.jsonl, line 1 is not JSON",
        b'{"text": "\xff"}': r"a\.jsonl, line 1 is not JSON .*utf-8",
        b"\x1f\x8b\x08 compressed": r"a\.jsonl is packed by gzip: unpack it",
        b"": r"no text in .*: give files that are not empty",
        b'{"text": ""}\n{"text": null}': r"no text in .*: give files that are not empty",
    }.items(),
)
def test_bad_rows_are_named(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        corpus.read(DataConfig(paths=(str(tmp_path),)))


def test_rows_of_parquet(tmp_path):
    texts = documents(30)
    table = pyarrow.table({"id": range(31), "text": [*texts, None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    config = DataConfig(paths=(str(tmp_path),), val_fraction=0.5)
    assert set(corpus.read(config)) == set(texts)
    with pytest.raises(UserError, match=r"a\.parquet has no field 'body', but id, text"):
        corpus.read(DataConfig(paths=(str(tmp_path),), text_field="body"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as a \.parquet file"):
        corpus.read(config)


ROWS = [{"id": i, "text": text} for i, text in enumerate(documents(30))]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


READ = {"A.JSONL": LINES, "a.ndjson": LINES, "B.Ndjson": LINES, "c.PARQUET": None, "pq": None}


REFUSED = {
    "a.txt": (LINES, "is no plain text, but JSON"),
    "A.TXT": (LINES[:-40], "is no plain text, but JSON"),
    "bom.text": ("\xef\xbb\xbf" + LINES, "is no plain text, but JSON"),
    "no_suffix": (LINES, r"has to end in \.jsonl"),
    "a.json": (LINES, "is no plain text, but JSON"),
    "B.JSON": (json.dumps(ROWS, indent=1), "write it as .jsonl"),
    "a.dump": (json.dumps({"rows": ROWS}, indent=1), "is no plain text, but JSON"),
    "a.CSV": ("id,text\n0,document\n", "is no plain text"),
    "a.jsonl.gz": ("\x1f\x8b\x08", "is packed by gzip"),
    "a.JSONL.ZST": ("(\xb5/\xfd", "is packed by Zstandard"),
    "a.bz2": ("BZh91AY", "is packed by bzip2"),
}


@pytest.mark.parametrize("name", READ)
def test_names_in_any_case_say_what_a_file_is(tmp_path, name):
    if READ[name]:
        (tmp_path / name).write_text(LINES)
    else:
        table = pyarrow.table({"text": [row["text"] for row in ROWS]})
        parquet.write_table(table, tmp_path / name)
    paths = (str(tmp_path / name) if name == "pq" else str(tmp_path),)
    read = corpus.read(DataConfig(paths=paths, val_fraction=0.5))
    assert set(read) == {row["text"] for row in ROWS}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_not_read_as_plain_text(tmp_path, name):
    content, said = REFUSED[name]
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=said):
        corpus.read(DataConfig(paths=(str(tmp_path / name),)))


def test_a_folder_says_what_it_holds_packed(tmp_path):
    (tmp_path / "a.txt").write_text("{a} text that begins as JSON does, and has words\n" * 9)
    assert corpus.read(DataConfig(paths=(str(tmp_path),)))
    (tmp_path / "b.jsonl.GZ").write_bytes(b"")
    with pytest.raises(UserError, match=r"b\.jsonl\.GZ is packed: unpack it, or move it away"):
        corpus.read(DataConfig(paths=(str(tmp_path),)))


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"a\.parquet.* needs .*pyarrow.*requirements/fineweb\.txt"):
        corpus.read(DataConfig(paths=(str(tmp_path),)))


def test_text_can_be_made_ready_without_training(text, capsys):
    assert main(["--paths", str(text), "--vocab-size", "320", "--verify"]) == 0
    assert "320 in the vocabulary" in capsys.readouterr().out
    assert main(["--paths", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere does not exist")
    assert main(["--vocab-size", "3"]) == 2


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


# Tokenizers


def test_tokenizer_is_lossless(tmp_path):
    text = "def f(x):\n\treturn  x\r\n\n  naïve 日本語 🎉 \x00 <|endoftext|> end \n"
    trained = tokenizer.train(["some other text"], 300)
    (tmp_path / "t.json").write_text(trained.to_str(), encoding="utf-8")
    loaded = tokenizer.load(tmp_path / "t.json")
    [(_, [end, *ids])] = tokenizer.encode(loaded, [text])
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert end == tokenizer.end_id(loaded) and end not in ids  # END inside a text is only text


def llama_like(path):
    """A tokenizer.json that, as LLaMA's, knows <s> and puts it in front of what it encodes."""
    made = tokenizer.train(documents(5), 270)
    vocab = {("<s>" if word == tokenizer.END else word): i for word, i in made.get_vocab().items()}
    plain = Tokenizer(tokenizer_models.BPE(vocab, []))
    plain.pre_tokenizer, plain.decoder = made.pre_tokenizer, made.decoder
    plain.add_special_tokens(["<s>"])
    plain.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocab["<s>"])])
    plain.save(str(path))
    return path


def test_files_with_a_given_tokenizer(text, tmp_path):
    path = llama_like(tmp_path / "tokenizer.json")
    said = []
    config = DataConfig(paths=(str(text),), tokenizer=str(path))
    dataset = prepare(config, said.append)
    start = dataset.tokenizer.token_to_id("<s>")
    assert tokenizer.end_id(dataset.tokenizer) == start
    assert start not in dataset.tokenizer.encode("<s> is text here").ids
    train, _ = corpus.split(corpus.read(config), config.val_fraction)
    assert dataset.train.ids[:].tolist().count(start) == len(train)
    decoded = dataset.tokenizer.decode(dataset.train.ids[:].tolist(), skip_special_tokens=False)
    assert decoded == "".join("<s>" + document for document in train)
    assert prepare(config, said.append).key == dataset.key and len(said) == 2
    assert prepare(DataConfig(paths=(str(text),), vocab_size=300), quiet).key != dataset.key


def test_a_tokenizer_of_the_hub_is_downloaded_once(tmp_path, monkeypatch):
    local = Tokenizer.from_file(str(llama_like(tmp_path / "t.json")))
    asked = []

    class Hub:
        from_file = Tokenizer.from_file

        @staticmethod
        def from_pretrained(name):
            asked.append(name)
            return local

    monkeypatch.setattr(tokenizer, "Tokenizer", Hub)
    vocabularies = [tokenizer.named("llama2", tmp_path).get_vocab() for _ in range(2)]
    assert vocabularies == [local.get_vocab()] * 2
    assert asked == ["hf-internal-testing/llama-tokenizer"]


@pytest.mark.parametrize(
    ("content", "said"),
    {
        None: "neither gpt2 nor llama2 nor a tokenizer.json",
        "{": "is not a tokenizer",
        Tokenizer(
            tokenizer_models.BPE({"a": 0}, [])
        ).to_str(): "has none of .*</s>: give .* as --data.end-token",
        Tokenizer(tokenizer_models.BPE({"</s>": 0, "b": 2}, [])).to_str(): "leaves out numbers",
    }.items(),
)
def test_bad_tokenizers(text, tmp_path, content, said):
    path = tmp_path / "t.json"
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(DataConfig(paths=(str(text),), tokenizer=str(path)), quiet)


def test_text_goes_through_a_normalizer_unharmed(tmp_path):
    """A tokenizer may change text, as LLaMA's does with spaces; bytes are counted before that."""
    made = Tokenizer.from_file(str(llama_like(tmp_path / "t.json")))
    made.normalizer = normalizers.Prepend("_")
    made.save(str(tmp_path / "t.json"))
    rows = write_rows(tmp_path / "a.jsonl", [{"text": t} for t in documents(40)])
    config = DataConfig(
        paths=(str(rows),), tokenizer=str(tmp_path / "t.json"), val_fraction=0.5, text_field="text"
    )
    dataset = prepare(config, quiet)
    size = sum(len(document.encode()) for document in corpus.read(config))
    assert dataset.train.meta.bytes + dataset.val.meta.bytes == size


def test_a_text_that_does_not_fit_into_memory_is_named(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    path.write_text("a")

    def too_large(path, size):
        raise MemoryError

    monkeypatch.setattr(corpus, "decode", too_large)
    with pytest.raises(UserError, match=r"large\.txt does not fit into memory"):
        list(corpus.texts(path, 2**50, "text"))
