"""Tokens in .bin files, as nanoGPT, llm.c and modded-nanogpt write them."""

import numpy as np
import pytest

from examples.train import main
from examples.trainer.data import tokenizer
from examples.trainer.data.bin_files import prepare, token_bytes
from examples.trainer.settings.run import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import losses, on_devices

TEXTS = ["größer als zwei\n" * 40, "und kleiner als drei\n" * 50]
KINDS = {"plain": None, "llm.c": (20240520, 1, "<u2"), "llama-3": (20240801, 7, "<u4")}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The path of a tokenizer, and the tokens of a text for each split."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made = tokenizer.train(TEXTS, 270)
    made.save(str(path))
    made = tokenizer.load(path)
    return path, {
        split: [i for _, ids in tokenizer.encode(made, [text] * 9) for i in ids]
        for split, text in zip(("train", "val"), TEXTS, strict=True)
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
    assert data.val.bytes == 9 * len(TEXTS[1].encode())  # for bits per byte


@pytest.mark.parametrize("kind", ["<u4", "<i4", "<i8"])
def test_wider_numbers_without_a_header_are_named(words, tmp_path, kind):
    path, tokens = words
    for split in ("train", "val"):
        np.asarray(tokens[split], kind).tofile(tmp_path / f"{split}.bin")
    with pytest.raises(UserError, match=r"numbers of more bits than uint16.*astype\('<u2'\)"):
        opened(tmp_path, path)


@pytest.mark.parametrize("kind", [">u2", ">u4", "<f2", "<f4", "<f8"])
def test_other_numbers_are_no_tokens(words, tmp_path, kind):
    path, tokens = words
    for split in ("train", "val"):
        np.asarray(tokens[split], kind).tofile(tmp_path / f"{split}.BIN")
    with pytest.raises(UserError, match=r"train\.BIN (has token|seems to hold)"):
        opened(tmp_path, path)


def test_tokens_count_the_bytes_of_their_text(words):
    made = tokenizer.load(words[0])
    lengths = token_bytes(made)
    for text in TEXTS:
        assert lengths[made.encode(text).ids].sum() == len(text.encode())


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


def test_a_run_reads_and_resumes_them(words, tmp_path, capsys):
    path, tokens = words
    for split in ("train", "val"):
        write(tmp_path / f"{split}.bin", tokens[split], None)
    given = ["--data.source", "bin", "--data.paths", str(tmp_path), "--data.tokenizer", str(path)]
    sizes = "--model.n-layer 1 --model.d-model 16 --model.context 16 --batch-size 8 --steps 4"
    few = [*sizes.split(), "--checkpoint-every", "2", "--sample-tokens", "2", "--eval-batches", "1"]
    with on_devices(1):
        assert main(["gpt-micro", *given, *few, "--runs-dir", str(tmp_path), "--name", "x"]) == 0
        whole = losses(tmp_path / "x")
        last = tmp_path / "x" / "checkpoints" / "4"
        last.rename(tmp_path / "moved")
        assert main(["--resume", str(tmp_path / "x")]) == 0, capsys.readouterr().err
    assert losses(tmp_path / "x") == whole
