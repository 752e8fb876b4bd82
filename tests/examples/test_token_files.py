"""Files of tokens: folders of our own, and the .bin files of nanoGPT, llm.c and modded-nanogpt."""

import dataclasses
import json
import resource
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import decoders

from examples.trainer.data import token_files, token_folder, tokenizer
from examples.trainer.data.bin_files import prepare, token_bytes
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
    assert found[:].tolist() == ids and found[:].dtype == dtype
    token_files.check_ids(found, vocab_size)
    with pytest.raises(DamagedFileError, match=rf"a\.bin has token {vocab_size - 1} at 2, "):
        token_files.check_ids(found, vocab_size - 1)


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
    found = open_folder(folder, verify=True)
    assert len(list(folder.glob("train-*.bin"))) == 2 and found.lost == 0
    for tokens, texts in ((found.train, [*TEXTS[:4], TEXTS[5]]), (found.val, [TEXTS[4]])):
        decoded = found.tokenizer.decode(tokens.ids[:].tolist(), skip_special_tokens=False)
        assert decoded.split(tokenizer.END)[1:] == texts
        assert tokens.meta.bytes == sum(map(len, texts)) and tokens.meta.tokens == len(tokens.ids)
    assert token_folder.read_index(folder).read == 6


def other_tokens(path):
    """A file of as many tokens."""
    found = token_files.open_file(path)
    return path.read_bytes()[: found.offset] + bytes(len(found) * found.dtype.itemsize)


DAMAGES = {
    "cut off": (lambda b: b[:-2], "is truncated or from elsewhere: its header says"),
    "cut in a token": (lambda b: b[:-1], "which uint16 does not divide"),
    "cut off in the header": (lambda b: b[:100], "is truncated or from elsewhere"),
    "too long": (lambda b: b + b"\0\0", "is truncated or from elsewhere"),
    "with a changed token": (lambda b: b[:-2] + bytes([b[-2] ^ 1, b[-1]]), "are not as written"),
    "beyond the vocabulary": (lambda b: b[:-1] + b"\xff", "has token .*vocabulary has 2"),
    "a photograph": (lambda b: b"\x89PNG" + b, "does not begin as a file of tokens"),
    "empty": (lambda b: b"", "does not begin as a file of tokens"),
    "of another version": (lambda b: b[:4] + b"\7" + b[5:], "has version 7 in its header: give 1"),
    "of other text": (other_tokens, "its tokens are not as written"),
    "of another length": (lambda b: b[:8] + b"\2\0\0\0" + b[12:1028], "does not have .* tokens"),
    "missing": (None, "cannot be read: No such file"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_not_as_written_is_named(folder, kind):
    change, said = DAMAGES[kind]
    path = folder / "train-00001.bin"
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content) if kind != "of other text" else changed(folder, content))
    token_files.mapped.cache_clear()
    with pytest.raises(DamagedFileError, match=rf"train-00001\.bin.*({said})"):
        open_folder(folder, verify=False)


def changed(folder, content):
    (folder / "x.bin").write_bytes(content)
    return other_tokens(folder / "x.bin")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["train"][0].update(bytes=13),
        lambda index: index["train"][0].update(name="../../elsewhere.bin"),
        lambda index: index["train"].pop(),
        lambda index: index.update(read=float("nan")),
        lambda index: index.pop("val"),
        lambda index: index.update(complete="no"),
    ],
)
def test_a_changed_index_is_refused(folder, change):
    path = folder / "index.json"
    written = json.loads(path.read_text())
    change(written["index"])
    path.write_text(json.dumps(written))
    with pytest.raises(
        DamagedFileError, match=r"index\.json does not fit its folder: it is not as"
    ):
        open_folder(folder, verify=False)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"index": 1}'])
def test_an_index_that_is_none_is_named(folder, content):
    (folder / "index.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"index\.json does not fit its folder"):
        open_folder(folder, verify=False)


def test_another_tokenizer_is_refused(folder):
    token_folder.keep_tokenizer(folder, tokenizer.train(TEXTS, 271))
    with pytest.raises(DamagedFileError, match=r"tokenizer\.json is truncated or from elsewhere"):
        open_folder(folder, verify=False)


def test_large_texts_are_hashed_on_request(folder, monkeypatch):
    monkeypatch.setattr(token_files, "HASHED_BYTES", 5)
    path = folder / "train-00001.bin"
    content = other_tokens(path)
    path.unlink()
    path.write_bytes(content)
    open_folder(folder, verify=False)
    with pytest.raises(DamagedFileError, match=path.name):
        open_folder(folder, verify=True)


def test_many_files_need_few_open_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(token_folder, "SHARD_TOKENS", 1)
    token_folder.keep_tokenizer(tmp_path, WORDS)
    writer = Writer(tmp_path)
    writer.fill(
        [f"{i} text" for i in range(601)], lambda text: "val" if text[0] == "6" else "train"
    )
    writer.finish()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    token_files.mapped.cache_clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        tokens = open_folder(tmp_path, verify=True).train
        loader = Loader(tokens.ids, context=8, batch_size=64, seed=0)
        first = [loader.batch(step)[0] for step in range(8)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    whole = Loader(tokens.ids[:], context=8, batch_size=64, seed=0)
    for step, batch in enumerate(first):
        np.testing.assert_array_equal(batch, whole.batch(step)[0])
    assert token_files.mapped.cache_info().currsize <= token_files.OPEN


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
    made = tokenizer.train(LINES, 270)
    made.save(str(path))
    made = tokenizer.load(path)
    return path, {
        split: [i for _, ids in tokenizer.encode(made, [text] * 9) for i in ids]
        for split, text in zip(("train", "val"), LINES, strict=True)
    }


def write(path, ids, kind):
    if kind is None:
        content = np.asarray(ids, "<u2").tobytes()
    else:
        header = np.zeros(256, "<i4")
        header[:3] = (kind[0], kind[1], len(ids))
        content = header.tobytes() + np.asarray(ids, kind[2]).tobytes()
    path.write_bytes(content)


def opened(folder, path, **change):
    config = DataConfig(source="bin", paths=(str(folder),), tokenizer=str(path), **change)
    return prepare(config, tokenizer.load(path))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_both_splits_are_read_from_all_shards(words, tmp_path, kind):
    path, tokens = words
    half = len(tokens["train"]) // 2
    write(tmp_path / "x_train_000001.bin", tokens["train"][:half], kind)
    write(tmp_path / "x_train_000002.bin", tokens["train"][half:], kind)
    write(tmp_path / "x_val_000000.bin", tokens["val"], kind)
    data = opened(tmp_path, path)
    assert data.train.ids[:].tolist() == tokens["train"]
    assert data.val.ids[:].tolist() == tokens["val"]
    assert data.val.meta.bytes == 9 * len(LINES[1].encode())  # for bits per byte


def test_a_token_has_as_many_bytes_if_its_decoder_is_in_a_sequence():
    made = tokenizer.train(LINES, 270)
    before = token_bytes(made)
    made.decoder = decoders.Sequence([made.decoder])
    np.testing.assert_array_equal(token_bytes(made), before)


@pytest.mark.parametrize("kind", ["<u4", "<i8", ">u2", "<f2", "<f8"])
def test_other_numbers_without_a_header_are_named(words, tmp_path, kind):
    path, tokens = words
    for split in ("train", "val"):
        np.asarray(tokens[split], kind).tofile(tmp_path / f"{split}.BIN")
    wide = r"numbers of more bits than uint16.*astype\('<u2'\)"
    other = r"train\.BIN (has token|seems to hold)"
    with pytest.raises(UserError, match=wide if kind in ("<u4", "<i8") else other):
        opened(tmp_path, path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\1\0\2", "train.bin has 3 bytes of tokens, which uint16 does not divide"),
        (b"\xff\xff", "train.bin has token 65535 at 0, .* has 2.. tokens"),
        (b"", "there are no train tokens in .*: give"),
        (np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes(), "says 9 tokens, and it has 0"),
        (np.array([5, -1, 7] * 99, "<i4").tobytes(), "token 65535 at 2, .* no uint16"),
        (b"\x93NUMPY\1\0", "train.bin is an array of NumPy: write its content alone"),
        (np.array([20240520, 1, 0] + [0] * 253, ">i4").tobytes(), "is of big-endian numbers"),
        (np.array([20240520, 2, 9] + [0] * 253, "<i4").tobytes(), "version 2 .*: give 1"),
    ],
)
def test_bad_files_are_named(words, tmp_path, content, said):
    path, tokens = words
    write(tmp_path / "val.bin", tokens["val"], None)
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=said):
        opened(tmp_path, path)


def test_other_tokens_have_another_name(words, tmp_path):
    path, tokens = words
    for split in ("train", "val"):
        write(tmp_path / f"{split}.bin", tokens[split], None)
    before = opened(tmp_path, path).key
    write(tmp_path / "train.bin", tokens["train"][::-1], None)
    assert opened(tmp_path, path).key != before


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
