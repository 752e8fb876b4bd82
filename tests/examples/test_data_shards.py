"""Token shards: their headers, what is refused, and windows across shards."""

import dataclasses

import numpy as np
import pytest

from examples.trainer.data import shards
from examples.trainer.data.loader import Joined, Loader
from examples.trainer.data.shards import HEADER_BYTES, Stamp, Writer, open_shards, read_header
from examples.trainer.system.errors import DamagedFileError

STAMP = Stamp("own", "5ec0de" * 10, 300)


def write(folder, documents, stamp=STAMP):
    """The shards of the documents, one each, with the hashes of their tokens."""
    writer = Writer(folder, "train", stamp)
    for read, ids in enumerate(documents, 1):
        writer.add(ids, 4 * len(ids))
        writer.flush(read)
    return {
        shards.shard_path(folder, "train", i): digest for i, digest in enumerate(writer.written)
    }


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_come_back(tmp_path, vocab_size, dtype):
    stamp = dataclasses.replace(STAMP, vocab_size=vocab_size)
    documents = [[0, 1, vocab_size - 1], [], [7]]
    paths = write(tmp_path, documents, stamp)
    tokens = open_shards(paths, stamp, verify=True)
    np.testing.assert_array_equal(tokens.ids[:], np.concatenate(documents))
    assert tokens.ids[:].dtype == dtype == tokens.meta.dtype
    assert (tokens.meta.tokens, tokens.meta.bytes) == (4, 16)
    header = read_header(list(paths)[2], stamp)
    assert header.read == 3 and header.tokenizer == stamp and header.tokens.sha256 in paths.values()


def test_header_can_be_read_by_eye(tmp_path):
    [path] = write(tmp_path, [[1, 2, 3]])
    first, second, _ = path.read_bytes()[:HEADER_BYTES].split(b"\n")
    assert first == b"optax_muonplus tokens, version 1"
    assert b'"tokenizer": {"name": "own"' in second and b'"tokens": 3' in second


def damage(path, kind, folder):
    content = path.read_bytes()
    header = content[:HEADER_BYTES]
    if kind == "of another tokenizer":
        return next(iter(write(folder, [[1, 2, 3]], Stamp("x", "0" * 64, 300)))).read_bytes()
    if kind == "of another type":
        wide = dataclasses.replace(STAMP, vocab_size=2**17)
        return next(iter(write(folder, [[1, 2, 3]], wide))).read_bytes()
    if kind == "of other text":
        return next(iter(write(folder, [[1, 2, 4]]))).read_bytes()
    return {
        "cut off": content[:-1],
        "cut off in the header": content[:100],
        "too long": content + b"\0\0",
        "with a changed token": content[:-1] + b"\1",
        "a photograph": b"\x89PNG" + content,
        "of another version": content.replace(b"version 1", b"version 0"),
        "with nonsense for a count": header.replace(b'"tokens": 3', b'"tokens": x') + content[-6:],
        "with a word for a count": header.replace(b'"tokens": 3', b'"tokens":""') + content[-6:],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "cut off": "truncated.*has 4101 bytes and not 4102",
        "cut off in the header": "truncated",
        "too long": "truncated or from elsewhere",
        "with a changed token": "damaged",
        "a photograph": "does not begin as a token shard",
        "of another version": "does not begin as a token shard",
        "of another tokenizer": "of the tokenizer x .0000",
        "of another type": "uint32, and those of a vocabulary of 300 are uint16",
        "of other text": "tokens of other text",
        "with nonsense for a count": "no valid header",
        "with a word for a count": "no valid header",
    }.items(),
)
def test_a_shard_that_is_not_as_written_is_named(tmp_path, kind, said):
    (tmp_path / "other").mkdir()
    paths = write(tmp_path, [[5, 6], [1, 2, 3]])
    bad = list(paths)[1]
    bad.write_bytes(damage(bad, kind, tmp_path / "other"))
    with pytest.raises(DamagedFileError, match=rf"train-00001\.bin.*{said}"):
        open_shards(paths, STAMP, verify=False)


def test_large_texts_are_hashed_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "HASHED_BYTES", 5)
    paths = write(tmp_path, [[5], [1, 2]])
    bad = list(paths)[1]
    bad.write_bytes(bad.read_bytes()[:-1] + b"\1")
    open_shards(paths, STAMP, verify=False)
    with pytest.raises(DamagedFileError, match=bad.name):
        open_shards(paths, STAMP, verify=True)


@pytest.mark.parametrize("ends", [[41], [4, 41], [1, 2, 3, 3, 9, 41], [0, 40, 41], [20, 41, 41]])
def test_batches_do_not_depend_on_the_cuts_of_shards(ends):
    ids = np.arange(41, dtype=np.uint16)
    joined = Joined([ids[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    assert len(joined) == 41
    for start in range(42):
        for stop in range(start, 44):
            np.testing.assert_array_equal(joined[start:stop], ids[start:stop])
    loader = Loader(ids, context=4, batch_size=3, seed=0)
    cut = dataclasses.replace(loader, ids=joined)
    for step in range(8):
        np.testing.assert_array_equal(cut.batch(step), loader.batch(step))
