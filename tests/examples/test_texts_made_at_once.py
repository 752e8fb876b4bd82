"""Processes that make one text at the same time: one of them makes it, and the others read it."""

import json
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from examples.trainer.data import hub, prepare, token_folder, tokenize_files, tokenizer
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

ROWS = [f"row {i}: " + "some words\n" * (1 + i * 7 % 11) for i in range(60)]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The path of the documents, beside a tokenizer, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer.train(ROWS, 280).save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return path


def of_files(rows):
    prepare.prepare(DataConfig(paths=(str(rows),), vocab_size=300), quiet)


def of_hub(rows):
    words = str(rows.parent / "tokenizer.json")
    config = DataConfig(hub=str(rows.parent), tokenizer=words, val_fraction=0.2)
    hub.prepare(config, quiet)


def of_parts(rows):
    asked = tokenize_files.Preparation(rows.parent, (str(rows),), "", val_fraction=0.2)
    tokenize_files.tokenize(asked, "part", rows)


@pytest.mark.parametrize(
    ("module", "work"), [(prepare, of_files), (hub, of_hub), (tokenize_files, of_parts)]
)
def test_a_text_that_another_process_makes_meanwhile_is_there_once(rows, module, work, monkeypatch):
    monkeypatch.setattr(hub, "open_stream", lambda source: Stream())
    writer, others = token_folder.Writer, []

    def begin(*args):
        monkeypatch.setattr(module, "Writer", writer)
        others.append(pool.submit(work, rows))
        wait(others, timeout=0.5)  # without a lock it is done by then
        return writer(*args)

    monkeypatch.setattr(module, "Writer", begin)
    with ThreadPoolExecutor(1) as pool:
        work(rows)
    others[0].result()
    [path] = rows.parent.rglob(token_folder.INDEX)
    index = token_folder.read_index(path.parent)
    assert sum(shard.bytes for shard in (*index.train, *index.val)) == sum(map(len, ROWS))
    with pytest.raises(UserError, match="has been completed by another process"):
        writer(path.parent, rows.parent)


class Stream:
    """As much of a `datasets.IterableDataset` as is used."""

    def skip(self, n):
        return [*self][n:]

    def __iter__(self):
        return ({"text": row} for row in ROWS)
