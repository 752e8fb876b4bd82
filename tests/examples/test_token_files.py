"""Files of tokens: folders of our own, and the .bin files of nanoGPT, llm.c and modded-nanogpt."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from examples.trainer.data import token_files, token_folder, tokenizer
from examples.trainer.data.bin_files import prepare
from examples.trainer.data.loader import Loader
from examples.trainer.data.token_files import Joined
from examples.trainer.data.token_folder import Writer, open_folder
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError
from tests.support.trainer import PATIENCE, ROOT

TEXTS = [f"text {i} of some words\n" * 3 for i in range(6)]
WORDS = tokenizer.train(TEXTS, 270)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_come_back(tmp_path, vocab_size, dtype):
    kind, ids = token_files.dtype_of(vocab_size), [0, 1, vocab_size - 1]
    token_files.write(tmp_path / "a.bin", np.asarray(ids, kind).tobytes(), kind)
    found = token_files.open_file(tmp_path / "a.bin")
    assert found[:].tolist() == ids and found[1:9].tolist() == ids[1:] and not len(found[3:])
    assert found[:].dtype == dtype
    token_files.check_ids(found.path, found[:], vocab_size)
    with pytest.raises(DamagedFileError, match=rf"a\.bin has the token {vocab_size - 1}, "):
        token_files.check_ids(found.path, found[:], vocab_size - 1)


@pytest.mark.parametrize("change", ["truncated", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    """A memory map ends the process with SIGBUS, or goes on with the file that was there."""
    path = tmp_path / "a.bin"
    token_files.write(path, bytes(2 * 9000), np.dtype("<u2"))
    found = token_files.open_file(path)
    assert not found[8000:8100].any()
    if change == "truncated":
        os.truncate(path, 4000)
    elif change == "replaced":
        token_files.write(path, b"\1" * 2 * 9000, np.dtype("<u2"))
    else:
        path.unlink()
    with pytest.raises(DamagedFileError, match=r"a\.bin (was changed after|cannot be read)"):
        found[8000:8100]
    if change == "replaced":
        assert token_files.open_file(path)[:2].tolist() == [257, 257]


@pytest.fixture
def folder(tmp_path):
    """A complete folder with two files of training text."""
    token_folder.keep_tokenizer(tmp_path, WORDS)
    writer = Writer(tmp_path)
    writer.fill(TEXTS[:2], lambda text: "train")
    writer.flush("train", "val")
    writer.fill(TEXTS[2:], lambda text: "val" if text == TEXTS[4] else "train")
    writer.finish()
    return tmp_path


def test_a_folder_has_its_documents(folder):
    found = open_folder(folder)
    assert len(list(folder.glob("train-*.bin"))) == 2
    for tokens, texts in ((found.train, [*TEXTS[:4], TEXTS[5]]), (found.val, [TEXTS[4]])):
        decoded = found.tokenizer.decode(tokens.ids[:].tolist(), skip_special_tokens=False)
        assert decoded.split(tokenizer.END)[1:] == texts
        assert tokens.meta.bytes == sum(map(len, texts)) and tokens.meta.tokens == len(tokens.ids)
    assert token_folder.read_index(folder).read == 6
    with pytest.raises(UserError, match="has been completed by another process"):
        Writer(folder)


DAMAGES = {
    "cut off": (lambda b: b[:-2], "it is truncated, or of another type"),
    "cut in a token": (lambda b: b[:-1], "and 1 bytes"),
    "cut off in the header": (lambda b: b[:100], "0 tokens of uint16 and 0 bytes, of which its"),
    "too long": (lambda b: b + b"\0\0", "it is truncated, or of another type"),
    "with a changed token": (lambda b: b[:-2] + bytes([b[-2] ^ 1, b[-1]]), "are not as written"),
    "beyond the vocabulary": (lambda b: b[:-1] + b"\xff", "has the token .*vocabulary has 2"),
    "a photograph": (lambda b: b"\x89PNG" + b, "does not begin as a file of tokens"),
    "empty": (lambda b: b"", "does not begin as a file of tokens"),
    "of another version": (lambda b: b[:4] + b"\7" + b[5:], "does not begin as a file of tokens"),
    "of other text": (lambda b: b[:1024] + bytes(len(b) - 1024), "tokens are not as written"),
    "of another length": (lambda b: b[:8] + b"\2\0\0\0" + b[12:1028], "has not .* tokens"),
    "missing": (None, "cannot be read: No such file"),
    "a pipe": (os.mkfifo, "is no regular file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_not_as_written_is_named(folder, kind):
    change, said = DAMAGES[kind]
    path = folder / "train-00001.bin"
    content = path.read_bytes()
    path.unlink()
    if change is os.mkfifo:
        os.mkfifo(path)
    elif change:
        path.write_bytes(change(content))
    with pytest.raises(UserError, match=rf"train-00001\.bin.*({said})"):
        open_folder(folder)


CHANGES = {
    "incomplete": (lambda index: index.update(complete=False), "is not complete: prepare it"),
    "outside": (lambda index: index["train"][0].update(name="../../x.bin"), "should match pattern"),
    "zero": (lambda index: index["train"][0].update(name="a\0b"), "should match pattern"),
    "surrogate": (lambda index: index["train"][0].update(name="\ud800"), "train.0.name"),
    "val is train": (lambda index: index.update(val=index["train"]), "is equal to one of training"),
    "no val": (lambda index: index.update(val=[]), "has no val text"),
    "not a number": (lambda index: index.update(read=float("nan")), "read"),
    "no boolean": (lambda index: index.update(complete="maybe"), "complete"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_does_not_fit_is_refused(folder, name):
    path = folder / "index.json"
    written = json.loads(path.read_text())
    CHANGES[name][0](written["index"])
    path.write_text(json.dumps(written))
    with pytest.raises(UserError, match=CHANGES[name][1]):
        open_folder(folder)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"format": 3, "index": {}}'])
def test_an_index_that_is_none_is_named(folder, content):
    (folder / "index.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"index\.json does not fit its folder"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "index.json"])
def test_pipes_do_not_hang(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name} is no regular file"):
        open_folder(folder)


def test_another_tokenizer_is_refused(folder):
    token_folder.keep_tokenizer(folder, tokenizer.train(TEXTS, 271))
    with pytest.raises(DamagedFileError, match=r"tokenizer\.json is not that of the tokens"):
        open_folder(folder)


@pytest.mark.parametrize("ends", [[41], [4, 41], [1, 2, 3, 3, 9, 41], [0, 40, 41], [20, 41, 41]])
def test_batches_do_not_depend_on_the_cuts_of_files(ends):
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


# .bin files

LINES = ["größer als zwei\n" * 40, "und kleiner als drei\n" * 50]
KINDS = {"plain": None, "llm.c": (20240520, 1, "<u2"), "llama-3": (20240801, 7, "<u4")}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The path of a tokenizer, and the tokens of a text for each split."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.train(LINES, 270).save(str(path))
    made = tokenizer.load(path)
    return path, {
        split: [i for _, ids in tokenizer.encode(made, [text] * 9) for i in ids]
        for split, text in zip(("train", "val"), LINES, strict=True)
    }


def write(path, ids, kind=None):
    header = np.zeros(256, "<i4")
    header[:3] = (*kind[:2], len(ids)) if kind else 0
    content = np.asarray(ids, kind[2] if kind else "<u2").tobytes()
    path.write_bytes(header.tobytes() + content if kind else content)


def opened(folder, path):
    config = DataConfig(source="bin", paths=(str(folder),), tokenizer=str(path))
    return prepare(config, tokenizer.load(path))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_both_splits_are_read_from_all_shards(words, tmp_path, kind):
    path, tokens = words
    half = len(tokens["train"]) // 2
    write(tmp_path / "x_train_000001.bin", tokens["train"][:half], kind)
    write(tmp_path / "x_train_000002.BIN", tokens["train"][half:], kind)
    write(tmp_path / "x_val_000000.bin", tokens["val"], kind)
    data = opened(tmp_path, path)
    assert data.train.ids[:].tolist() == tokens["train"]
    assert data.val.ids[:].tolist() == tokens["val"]
    assert data.val.meta.bytes == 9 * len(LINES[1].encode())  # for bits per byte


def test_a_replaced_file_gives_its_own_tokens_and_key(words, tmp_path):
    path, tokens = words
    for split in ("train", "val"):
        write(tmp_path / f"{split}.bin", tokens[split])
    before = opened(tmp_path, path)
    assert before.train.ids[:].tolist() == tokens["train"]
    write(tmp_path / "train.bin", tokens["train"][::-1])
    after = opened(tmp_path, path)
    assert after.train.ids[:].tolist() == tokens["train"][::-1] and after.key != before.key


@pytest.mark.parametrize("how", ["one name", "a copy", "a link"])
def test_one_text_for_both_splits_is_refused(words, tmp_path, how):
    path, tokens = words
    name = "train_val.bin" if how == "one name" else "train.bin"
    write(tmp_path / name, tokens["train"])
    if how == "a copy":
        write(tmp_path / "val.bin", tokens["train"])
    elif how == "a link":
        (tmp_path / "val.bin").symlink_to(tmp_path / name)
    with pytest.raises(UserError, match=r"validation text in .* is equal to one of training text"):
        opened(tmp_path, path)


@pytest.mark.parametrize("kind", ["<u4", "<i8", ">u2", "<f2", "<f8"])
def test_other_numbers_without_a_header_are_named(words, tmp_path, kind):
    path, tokens = words
    for split in ("train", "val"):
        np.asarray(tokens[split], kind).tofile(tmp_path / f"{split}.BIN")
    wide = r"numbers of more bits than uint16.*astype\('<u2'\)"
    other = r"train\.BIN (has the token|seems to hold)"
    with pytest.raises(UserError, match=wide if kind in ("<u4", "<i8") else other):
        opened(tmp_path, path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\1\0\2", "train.bin has 1 tokens of uint16 and 1 bytes: it is truncated"),
        (b"\xff\xff", "train.bin has the token 65535, .* has 2.. tokens"),
        (b"", "there are no train tokens in .*: give"),
        (np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes(), "its header says that it has 9"),
        (np.array([5, -1, 7] * 99, "<i4").tobytes(), "token 65535, .* no uint16"),
        (np.array([20240520, 2, 9] + [0] * 253, "<i4").tobytes(), "tokens of this version"),
    ],
)
def test_bad_files_are_named(words, tmp_path, content, said):
    path, tokens = words
    write(tmp_path / "val.bin", tokens["val"])
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=said):
        opened(tmp_path, path)


def test_pipes_characters_and_nothing_are_refused(words, tmp_path):
    path, tokens = words
    with pytest.raises(UserError, match="nowhere does not exist"):
        opened(tmp_path / "nowhere", path)
    write(tmp_path / "val.bin", tokens["val"])
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin is no regular file"):
        opened(tmp_path, path)
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(UserError, match=r"meta\.pkl says that these tokens are nanoGPT's charact"):
        opened(tmp_path, path)


# Limits of this machine


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
