"""Shards from elsewhere are checked, and limits of this machine end in a sentence."""

import json
import subprocess
import sys

import pytest

from examples.trainer.data import cache, files
from examples.trainer.data.shards import HEADER_BYTES, MAGIC, Stamp, Writer, open_shards, shard_path
from examples.trainer.system.errors import DamagedFileError, UserError
from tests.support.trainer import PATIENCE, ROOT

STAMP = Stamp("own", "5ec0de" * 10, 300)


@pytest.fixture
def shard(tmp_path):
    """A shard, with its hash, and a function that replaces a part of its header."""
    writer = Writer(tmp_path, "val", STAMP)
    writer.add([1, 2, 3], 12)
    writer.flush(1)
    path = shard_path(tmp_path, "val", 0)

    def replace(old, new):
        content = path.read_bytes()
        header = content[len(MAGIC) : HEADER_BYTES].rstrip().replace(old, new)
        path.write_bytes((MAGIC + header).ljust(HEADER_BYTES - 1) + b"\n" + content[HEADER_BYTES:])

    return {path: writer.written[0]}, replace


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tokens": 3', b'"tokens": Infinity'),
        (b'"read": 1', b'"read": Infinity'),
        (b'"read": 1', b'"read": NaN'),
        (b'"tokens": 3', b'"tokens": 3.0'),
        (b'"tokens": 3', b'"tokens": "3"'),
        (b'"tokens": 3', b'"tokens": true'),
        (b'"tokens": 3', b'"tokens": -3'),
        (b'"bytes": 12', b'"bytes": "many"'),
        (b'"bytes": 12', b'"bytes": 0'),
        (b'"bytes": 12', b'"bytes": 13'),
        (b'"bytes": 12', b'"bytes": -1'),
        (b'"read": 1', b'"read": ' + 1000 * b"[" + 1000 * b"]"),
    ],
    ids=str,
)
def test_headers_are_checked_by_type_and_by_their_hash(shard, old, new):
    expected, replace = shard
    assert open_shards(expected, STAMP, verify=True).meta.bytes == 12
    replace(old, new)
    with pytest.raises(DamagedFileError):
        open_shards(expected, STAMP, verify=False)


def test_a_header_without_a_hash_counts_bytes_all_the_same(shard):
    expected, replace = shard
    [path] = expected
    header = json.loads(path.read_bytes()[len(MAGIC) : HEADER_BYTES])
    own = f', "sha256": "{header["sha256"]}"'.encode()
    replace(own, b"")  # as earlier versions wrote it
    assert open_shards(expected, STAMP, verify=True).meta.bytes == 12
    replace(b'"bytes": 12', b'"bytes": 0')
    with pytest.raises(DamagedFileError, match="counts no bytes"):
        open_shards(expected, STAMP, verify=True)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    writer = Writer(tmp_path, "train", STAMP)
    writer.add([1, 299, 300], 12)
    writer.flush(1)
    with pytest.raises(DamagedFileError, match="has the token 300"):
        open_shards({shard_path(tmp_path, "train", 0): writer.written[0]}, STAMP, verify=False)


def test_meta_json_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "meta.json").write_text(100_000 * "[")
    with pytest.raises(DamagedFileError, match=r"meta\.json does not fit"):
        cache.read_meta(tmp_path)


# Limits of this machine


def test_a_text_that_does_not_fit_into_memory_is_named(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    path.write_text("a")

    def too_large(path, size):
        raise MemoryError

    monkeypatch.setattr(files, "decode", too_large)
    with pytest.raises(UserError, match=r"large\.txt does not fit into memory"):
        list(files.texts(path, 2**50, "text"))


def test_ctrl_c_in_the_first_seconds_ends_with_a_sentence():
    program = """
import sys, importlib.abc
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("tyro", "jax", "pydantic"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from examples import train
sys.exit(train.main([]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 130 and "stopped before the run began" in done.stdout
    assert "Traceback" not in done.stderr
