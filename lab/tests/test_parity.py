"""The trainer repeats trainings of PyTorch, and says where a file or the arithmetic is another."""

import re
from pathlib import Path

import numpy as np
import pytest

from lab.parity import main

FILE = Path(__file__).parent / "published_training.npz"
HEADS = ("--heads", "2")
ROW = re.compile(r"^(gpt|llama) +(logits|losses, (\w+)) +([\d.e+-]+|inf)( !)? *(\d*) +\S+$", re.M)
ARRAYS = dict(np.load(FILE))
LLAMA = {
    name: x
    for name, x in ARRAYS.items()
    if name in ("inputs", "targets", "llama/logits", "llama/losses/col_row")
    or name.startswith("llama/init/")
}
"""The smallest file with a training: most tests need one program only."""


def rows(text):
    """(family, what) to (largest difference, its step)."""
    return {
        (family, norm or what): (float(size), int(step or 0))
        for family, what, norm, size, _, step in ROW.findall(text)
    }


@pytest.fixture
def file_of(tmp_path):
    """A function of arrays to a file with them."""

    def write(arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        return str(tmp_path / "own.npz")

    return write


def test_trainings_of_the_paper_are_repeated(file_of, capsys):
    """Of each family, with some of the norms; the file has them all."""
    norms = {"gpt": ("none", "row", "row_col"), "llama": ("col", "col_row")}
    wanted = {(f, what) for f, names in norms.items() for what in ("logits", *names)}
    kept = {f"{family}/losses/{norm}" for family, names in norms.items() for norm in names}
    arrays = {name: x for name, x in ARRAYS.items() if "/losses/" not in name or name in kept}
    assert main([file_of(arrays), *HEADS]) == 0
    found = rows(capsys.readouterr().out)
    assert found.keys() == wanted
    for (family, what), (size, _) in found.items():
        # Sums of 24-bit numbers in another order; 40 steps let some differences grow tenfold.
        assert size < (1e-6 if what == "logits" else 5e-6), (family, what)


def test_another_loss_and_other_logits_are_found(file_of, capsys):
    losses = LLAMA["llama/losses/col_row"].copy()
    losses[7] *= 1.002
    path = file_of({**LLAMA, "llama/losses/col_row": losses})
    assert main([path, *HEADS]) == 1
    output = capsys.readouterr().out
    size, step = rows(output)["llama", "col_row"]
    assert (size, step) == (pytest.approx(0.002, rel=0.01), 7)
    assert "1 larger than allowed (marked with !)." in output
    assert main([path, *HEADS, "--tolerance", "1e-4", "1e-2"]) == 0
    assert main([path, *HEADS, "--tolerance", "1e-12"]) == 1  # for both
    assert "2 larger" in capsys.readouterr().out


def test_the_settings_of_the_rule_reach_the_trainer(file_of, capsys):
    flags = ["--llama-floor", "0.5"]
    assert main([file_of(LLAMA), *HEADS, *flags, "--tolerance", "1e-4"]) == 1
    found = rows(capsys.readouterr().out)
    assert found["llama", "logits"][0] < 1e-6
    assert found["llama", "col_row"][0] > 1e-4


NORM = "llama/init/model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": None}, "has no array inputs: give an .npz file of the form"),
        ({"inputs": LLAMA["inputs"] + 0.5}, r"inputs and targets are float64 \(40, 3, 2, 8\)"),
        ({"llama/losses/cols": np.ones(40)}, "the norms of llama/losses/NORM are of none, col, r"),
        ({NORM: np.full(16, np.nan)}, "norm.weight has other values than finite numbers"),
    ],
)
def test_bad_files_get_a_sentence(change, words, file_of, capsys):
    arrays = {name: x for name, x in {**LLAMA, **change}.items() if x is not None}
    assert main([file_of(arrays), *HEADS]) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(rf"error: [^\n]*{words}[^\n]*\.\n", captured.err), captured.err
    assert not captured.out
