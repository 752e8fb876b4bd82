"""Files of tokens, which are those of nanoGPT."""

import os

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from examples.trainer.data import token_files, tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_tokens_come_back(tmp_path, dtype):
    ids = np.array([0, 1, 65535], dtype)
    ids.tofile(tmp_path / "a.bin")
    found = token_files.open_file(tmp_path / "a.bin", np.dtype(dtype))
    assert found[:].tolist() == ids.tolist() and found[:].dtype == dtype
    assert found[1:9].tolist() == ids[1:].tolist() and not len(found[3:])
    token_files.check_ids(found, 65536)
    with pytest.raises(UserError, match=r"a\.bin has the token 65535, .* 65535 tokens"):
        token_files.check_ids(found, 65535)


@pytest.mark.parametrize("change", ["truncated", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    """A memory map ends the process with SIGBUS, or goes on with the file that was there."""
    path = tmp_path / "a.bin"
    np.zeros(9000, "<u2").tofile(path)
    found = token_files.open_file(path, np.dtype("<u2"))
    assert not found[8000:8100].any()
    if change == "truncated":
        os.truncate(path, 4000)
    elif change == "replaced":
        path.unlink()
        np.full(9000, 257, "<u2").tofile(path)
    else:
        path.unlink()
    with pytest.raises((UserError, OSError), match=r"a\.bin( was changed after|')"):
        found[8000:8100]
    if change == "replaced":
        assert token_files.open_file(path, np.dtype("<u2"))[:2].tolist() == [257, 257]


# Files of other trainers

LINES = ["größer als zwei\n" * 40, "und kleiner als drei\n" * 50]


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


def write(path, ids):
    np.asarray(ids, "<u2").tofile(path)


def opened(folder, path):
    return prepare(DataConfig(source="bin", paths=(str(folder),), tokenizer=str(path)), quiet)


def test_both_splits_are_read(words, tmp_path):
    path, tokens = words
    write(tmp_path / "x_train_000001.BIN", tokens["train"])
    write(tmp_path / "x_val_000000.bin", tokens["val"])
    data = opened(tmp_path, path)
    assert data.train.ids[:].tolist() == tokens["train"]
    assert data.val.ids[:].tolist() == tokens["val"]
    assert data.val.bytes == 9 * len(LINES[1].encode())  # for bits per byte
    write(tmp_path / "x_train_000002.bin", tokens["train"])
    with pytest.raises(UserError, match=r"there are 2 files of train tokens .* joined by cat"):
        opened(tmp_path, path)


@pytest.mark.parametrize("magic", [20240520, 20240801])  # of llm.c
def test_a_header_is_refused(words, tmp_path, magic):
    path, tokens = words
    header = np.array([magic, 1, 9] + [0] * 253, "<i4")
    for split in ("train", "val"):
        content = header.tobytes() + np.asarray(tokens[split], "<u2").tobytes()
        (tmp_path / f"{split}.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"has a header, as llm.c's.*offset=1024"):
        opened(tmp_path, path)
    for split in ("train", "val"):
        own = tmp_path / f"{split}.bin"
        np.fromfile(own, "<u2", offset=1024).tofile(own)
    assert opened(tmp_path, path).train.ids[:].tolist() == tokens["train"]


def test_tokens_of_characters_have_their_bytes(tmp_path):
    """As lab.benchmarks.tiny_shakespeare has them: no token between texts, and no decoder."""
    numbers = {letter: i for i, letter in enumerate("abö \n")}
    Tokenizer(models.WordLevel(numbers, unk_token="a")).save(str(tmp_path / "words.json"))
    for split, text in (("train", "ab\n" * 9), ("val", "ab öa\n")):
        write(tmp_path / f"{split}.bin", [numbers[letter] for letter in text])
    assert opened(tmp_path, tmp_path / "words.json").val.bytes == len("ab öa\n".encode())


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
    with pytest.raises(UserError, match=r"validation text .* is equal to the training text"):
        opened(tmp_path, path)


BAD = {
    b"\1\0\2": "train.bin has 1 tokens of uint16 and 1 bytes: it is truncated",
    b"\xff\xff": "train.bin has the token 65535, .* has 2.. tokens",
    np.array([5, -1, 7] * 99, "<i4").tobytes(): "token 65535, .* no uint16",
}


@pytest.mark.parametrize(("content", "said"), BAD.items())
def test_bad_files_are_named(words, tmp_path, content, said):
    path, tokens = words
    write(tmp_path / "val.bin", tokens["val"])
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=said):
        opened(tmp_path, path)


def test_pipes_and_nothing_are_refused(words, tmp_path):
    path, tokens = words
    write(tmp_path / "val.bin", tokens["val"])
    with pytest.raises(UserError, match=r"there are no files of train tokens in .*: give"):
        opened(tmp_path, "no tokenizer")  # files are looked for first
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin is no regular file"):
        opened(tmp_path, path)


def test_wider_numbers_without_a_header_are_refused(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(1, 100, dtype="int64").tofile(path)
    with pytest.raises(UserError, match="numbers of more bits than uint16"):
        token_files.check_ids(token_files.open_file(path, np.dtype("<u2")), 300)


def test_characters_of_nanogpt_are_refused(tmp_path):
    (tmp_path / "meta.pkl").touch()
    np.arange(9, dtype="<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"meta.pkl says that these tokens are nanoGPT's"):
        token_files.bin_of([str(tmp_path)], "train")
