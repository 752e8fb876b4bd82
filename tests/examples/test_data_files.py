"""Rows of .jsonl and .parquet files as documents, and tokenizers by name."""

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, normalizers, processors
from tokenizers import models as tokenizer_models

from examples.data import main
from examples.trainer.data import corpus, token_folder, tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import DataConfig
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


def test_byte_limit_counts_the_text_in_rows(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": c * 10, "id": "long" * 99} for c in "aéz"])
    read = corpus.read(DataConfig(paths=(str(path),), max_bytes=15, val_fraction=0.9))
    assert set(read) == {"a" * 10, "é" * 2}


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


def test_large_text_is_cut_into_shards(text, monkeypatch, tmp_path):
    config = DataConfig(paths=(str(text),), vocab_size=300)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "whole"))
    whole = prepare(config, quiet)
    monkeypatch.setattr(token_folder, "SHARD_TOKENS", 5000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cut"))
    cut = prepare(config, quiet)
    assert len(list(tmp_path.rglob("cut/**/train-*.bin"))) > 5
    assert cut.train.ids[:].tolist() == whole.train.ids[:].tolist()
    assert cut.train.bytes == whole.train.bytes


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
    assert dataset.train.bytes + dataset.val.bytes == size
