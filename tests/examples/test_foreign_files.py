"""Run folders and shards from elsewhere: what they say is checked, what they name stays safe."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from examples import generate, perplexity
from examples.train import main
from examples.trainer.data import cache, files
from examples.trainer.data.shards import HEADER_BYTES, MAGIC, Stamp, Writer, open_shards, shard_path
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.runs import integrity
from examples.trainer.system.errors import DamagedFileError, UserError
from tests.support.trainer import PATIENCE, ROOT, STEPS, train

pytestmark = pytest.mark.usefixtures("one_device")
LAST = str(STEPS)


@pytest.fixture
def copy(trained_run, tmp_path):
    """A copy of a finished run, which resumes, is measured and is sampled."""
    return shutil.copytree(trained_run, tmp_path / "x")


def said(capsys, *command):
    """What is said of a folder that is refused."""
    run = {"resume": main, "sample": generate.main, "measure": perplexity.main}[command[0]]
    arguments = ["--resume", *command[1:]] if command[0] == "resume" else [*command[1:]]
    assert run(list(map(str, arguments))) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error") and "Traceback" not in shown
    return shown


# A run folder is one object


def test_the_state_of_another_run_is_refused(copy, tmp_path, text, capsys):
    assert train(text, tmp_path, "--name", "other", "--seed", "5") == 0
    state = copy / "checkpoints" / LAST / "state"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "other" / "checkpoints" / LAST / "state", state)
    for command in ("resume", "sample"):
        assert "its state is that of another checkpoint" in said(capsys, command, copy)


def test_the_state_of_another_step_is_refused(copy, capsys):
    steps = sorted(int(path.name) for path in (copy / "checkpoints").iterdir())
    state = copy / "checkpoints" / LAST / "state"
    shutil.rmtree(state)
    shutil.copytree(copy / "checkpoints" / str(steps[0]) / "state", state)
    assert "its state is that of another checkpoint" in said(capsys, "sample", copy)


def test_a_changed_tokenizer_is_refused_by_all(copy, text, capsys):
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(content))
    for command in (("resume", copy), ("sample", copy), ("measure", copy, "--texts", text)):
        assert "tokenizer_sha256 was" in said(capsys, *command)


def test_a_changed_configuration_is_refused_by_all(copy, text, capsys):
    path = copy / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["n_head"] = 1
    path.write_text(json.dumps(content))
    for command in (("resume", copy), ("sample", copy), ("measure", copy, "--texts", text)):
        assert "model.n_head was 2, and is 1" in said(capsys, *command)


def test_checkpoints_of_earlier_versions_are_not_bound(copy):
    about = copy / "checkpoints" / LAST / "about"
    (about / integrity.LISTS / integrity.BOUND).unlink()
    written = json.loads((about / "metadata").read_text())
    del written["tokenizer_sha256"]
    (about / "metadata").write_text(json.dumps(written))
    integrity.write_checksums(about)
    assert trained.load(CheckpointRef(copy)).step == STEPS


# Links, pipes and devices


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_files_that_are_links_are_not_followed(copy, tmp_path, name, capsys):
    mine = tmp_path / "mine"
    mine.write_text("")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(mine)
    shutil.rmtree(copy / "checkpoints" / LAST)  # so that there are steps to write
    assert f"{copy / name} is a link, a pipe or a device" in said(capsys, "resume", copy)
    assert mine.read_text() == ""


def test_checkpoints_that_are_a_link_are_refused(copy, tmp_path, capsys):
    mine = tmp_path / "mine"
    shutil.copytree(copy / "checkpoints", mine)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").symlink_to(mine)
    assert "is a link, a pipe or a device" in said(capsys, "resume", copy)


def test_foreign_folders_with_numbers_are_not_deleted(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / LAST)
    for number in ("1", "2", "3"):
        (copy / "checkpoints" / number).mkdir()
        (copy / "checkpoints" / number / "letter.txt").write_text("dear")
    assert "is no checkpoint of this trainer" in said(capsys, "resume", copy)
    assert (copy / "checkpoints" / "1" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "metrics.jsonl"])
def test_pipes_and_devices_do_not_hang(copy, name, capsys):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert str(copy / name) in said(capsys, "resume", copy)
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    assert str(copy / name) in said(capsys, "resume", copy)


# Lists of checksums


@pytest.fixture
def listed(tmp_path):
    """A folder with a file in its list, and a function that adds a name to the list."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "data").write_bytes(b"0123")
    integrity.write_checksums(folder)

    def add(name):
        path = folder / integrity.LISTS / integrity.REST
        path.write_text(json.dumps({**json.loads(path.read_text()), name: [4, "0"]}))

    return folder, add


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "/dev/zero", "a/../../secret", "\0", "link", "pipe", "."],
)
def test_lists_name_regular_files_inside(listed, name):
    folder, add = listed
    (folder.parent / "secret").write_text("1234")
    (folder / "link").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    assert integrity.verify(folder)
    add(name)
    with pytest.raises(integrity.Damaged) as caught:
        integrity.verify(folder)
    assert "1234" not in str(caught.value) and "content" not in str(caught.value)


def test_links_to_folders_are_not_followed(listed):
    folder, add = listed
    (folder.parent / "secrets").mkdir()
    (folder.parent / "secrets" / "key").write_text("1234")
    (folder / "d").symlink_to("../secrets")
    add("d/key")
    with pytest.raises(integrity.Damaged, match="d/key is no regular file"):
        integrity.verify(folder)


def test_a_file_in_no_list_is_refused(listed):
    folder, _ = listed
    (folder / "more").write_bytes(b"")
    with pytest.raises(integrity.Damaged, match="more is in no list of checksums"):
        integrity.verify(folder)
    (folder / integrity.LISTS / integrity.REST).write_text("{}")
    with pytest.raises(integrity.Damaged, match="data is in no list of checksums"):
        integrity.verify(folder)


# Headers of shards

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
