"""The trainer repeats trainings of PyTorch, and says where a file or the arithmetic is another."""

import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
import tyro

from examples.parity import main
from examples.trainer.parity.replay import Parity, optimizer_for

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
    """Of each family, and with each norm; the file has them all."""
    norms = {"gpt": ("none", "row", "row_col"), "llama": ("col", "col_row")}
    wanted = {(f, what) for f, names in norms.items() for what in ("logits", *names)}
    assert main([file_of(with_norms(norms)), *HEADS]) == 0
    found = rows(capsys.readouterr().out)
    assert found.keys() == wanted
    for (family, what), (size, _) in found.items():
        # Sums of 24-bit numbers in another order; 40 steps let some differences grow tenfold.
        assert size < (1e-6 if what == "logits" else 5e-6), (family, what)


def with_norms(norms):
    """The arrays of the file, with the losses of some norms of each family."""
    kept = {f"{family}/losses/{norm}" for family, names in norms.items() for norm in names}
    return {name: x for name, x in ARRAYS.items() if "/losses/" not in name or name in kept}


def test_one_family_and_wider_integers(file_of, capsys):
    wide = {name: LLAMA[name].astype(np.int64) for name in ("inputs", "targets")}
    assert main([file_of({**LLAMA, **wide}), *HEADS]) == 0
    assert rows(capsys.readouterr().out).keys() == {("llama", "logits"), ("llama", "col_row")}


def test_another_loss_and_other_logits_are_found(file_of, capsys):
    losses = LLAMA["llama/losses/col_row"].copy()
    losses[7] *= 1.002
    path = file_of({**LLAMA, "llama/losses/col_row": losses})
    assert main([path, *HEADS]) == 1
    output = capsys.readouterr().out
    size, step = rows(output)["llama", "col_row"]
    assert (size, step) == (pytest.approx(0.002, rel=0.01), 7)
    assert "1 of 2 are larger than allowed (marked with !)." in output
    assert main([path, *HEADS, "--tolerance", "1e-4", "1e-2"]) == 0
    assert main([path, *HEADS, "--tolerance", "1e-12"]) == 1  # for both
    assert "2 of 2 are larger" in capsys.readouterr().out
    logits = LLAMA["llama/logits"].copy()
    logits[1, 2, 3] += 2e-4
    assert main([file_of({**LLAMA, "llama/logits": logits}), *HEADS]) == 1
    assert rows(capsys.readouterr().out)["llama", "logits"][0] == pytest.approx(2e-4, rel=0.01)


def test_a_training_that_diverges_differs(file_of, capsys):
    rates = [f"--optimizer.{name}=1e38" for name in ("learning-rate", "adam-learning-rate")]
    assert main([file_of(LLAMA), *HEADS, *rates]) == 1
    assert rows(capsys.readouterr().out)["llama", "col_row"][0] == np.inf


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--optimizer.warmup-start", "None"], "warmup_start", None),
        (["--llama-schedule", "constant_linear"], "schedule", "constant_linear"),
        (["--optimizer.hold-share", "0.5"], "hold_share", 0.5),
        (["--llama-floor", "0.5"], "schedule_floor", 0.5),
        (["--optimizer.clip-norm", "0.1"], "clip_norm", 0.1),
        (["--optimizer.adam-weight-decay", "0"], "adam_weight_decay", 0.0),
    ],
    ids=lambda flags: flags[0] if isinstance(flags, list) else "",
)
def test_flags_are_settings_of_the_rule(flags, field, value):
    plain, found = (
        optimizer_for(tyro.cli(Parity, args=[str(FILE), *HEADS, *own]), "llama", "col_row")
        for own in ([], flags)
    )
    assert getattr(plain, field) != value
    assert found == dataclasses.replace(plain, **{field: value})


def test_the_settings_of_the_rule_reach_the_trainer(file_of, capsys):
    flags = ["--llama-floor", "0.5"]
    assert main([file_of(LLAMA), *HEADS, *flags, "--tolerance", "1e-4"]) == 1
    found = rows(capsys.readouterr().out)
    assert found["llama", "logits"][0] < 1e-6
    assert found["llama", "col_row"][0] > 1e-4


INIT = "llama/init/model.embed_tokens.weight"
UP = "llama/init/model.layers.1.mlp.up_proj.weight"
NORM = "llama/init/model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": None}, "has no array inputs: give an .npz file of the form"),
        ({"targets": LLAMA["targets"][:5]}, r"targets has the shape \(5, 3, 2, 8\) and not \(40"),
        ({"inputs": LLAMA["inputs"][0]}, r"inputs is int32 of shape \(3, 2, 8\), and has to be"),
        ({"inputs": LLAMA["inputs"] + 0.5}, "inputs is float64 of shape .* whole numbers"),
        ({"inputs": LLAMA["inputs"] - 1}, "the tokens go from -1 to 30, and the embedding has 31"),
        ({"llama/logits": None}, "has no array llama/logits"),
        ({"llama/logits": np.ones((2, 8, 30))}, "logits of 30 words, and the embedding has 31"),
        ({"llama/logits": np.ones((1, 8, 31))}, r"llama/logits has the shape \(1, 8, 31\) and not"),
        ({"llama/logits": np.array("x")}, "llama/logits has no numbers but <U1"),
        ({"llama/losses/col_row": None}, "has no array llama/losses/NORM"),
        ({"llama/losses/cols": np.ones(40)}, "losses/cols is of none of the norms none, col, row"),
        ({"llama/losses/row": np.ones(39)}, r"llama/losses/row has the shape \(39,\) and not \(40"),
        ({NORM: np.full(16, np.nan)}, "norm.weight has numbers that are not finite: give"),
        ({NORM: None}, "own.npz, llama: model.norm.weight is missing: give all parameters"),
        ({INIT: None}, "own.npz, llama: model.embed_tokens.weight is missing"),
        ({f"{NORM}2": np.ones(16)}, "model.norm.weight2 is not in a llama of 2 layers"),
        ({UP: np.ones((41, 16))}, r"up_proj.weight has the shape \(41, 16\), and .* \(40, 16\)"),
        (dict.fromkeys(set(LLAMA) - {"inputs", "targets"}), "begins with gpt/ or llama/: give"),
    ],
)
def test_bad_files_get_a_sentence(change, words, file_of, capsys):
    arrays = {name: x for name, x in {**LLAMA, **change}.items() if x is not None}
    assert main([file_of(arrays), *HEADS]) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(rf"error: [^\n]*{words}[^\n]*\.\n", captured.err), captured.err
    assert not captured.out


def test_rows_longer_than_the_positions(file_of, capsys):
    position = "gpt/init/transformer.wpe.weight"
    assert main([file_of({**ARRAYS, position: ARRAYS[position][:7]}), *HEADS]) == 2
    assert "rows have 8 tokens, and the model has 7 positions" in capsys.readouterr().err


def pickled():
    """An .npz file with an object of Python."""
    file = io.BytesIO()
    np.savez(file, inputs=np.array([{}], dtype=object))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not an .npz file"),
        (None, "No such file"),
        (pickled(), "cannot be read as an .npz file, Object arrays"),
        (FILE.read_bytes()[:30_000], "is not an .npz file"),
        (FILE.read_bytes()[:9000] + bytes(2000) + FILE.read_bytes()[11_000:], "cannot be read as"),
    ],
    ids=["empty", "missing", "pickled", "cut off", "damaged"],
)
def test_other_files_get_a_sentence(content, words, tmp_path, capsys):
    path = tmp_path / "own.npz"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path), *HEADS]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--heads", "3"], "--heads 3 does not divide the width 16: give"),
        (["--heads", "16"], "--heads 16 makes heads of 1 numbers, and llama rotates them in pairs"),
        (["--heads", "0"], "--heads is 0: it should be greater than or equal to 1"),
        (
            [*HEADS, "--tolerance", "1", "1", "1"],
            "--tolerance is [1.0, 1.0, 1.0]: Tuple should have at most 2 items",
        ),
        ([*HEADS, "--gpt-floor", "2"], "--gpt-floor is 2.0: it should be less than or equal to 1"),
        ([*HEADS, "--optimizer.norm-eps", "-1"], "--optimizer.norm-eps"),
    ],
)
def test_impossible_flags_get_a_sentence(flags, words, capsys):
    assert main([str(FILE), *flags]) == 2
    assert words in capsys.readouterr().err
