"""`benchmarks.updates compare` finds every difference between two files of updates."""

import numpy as np
import pytest

from benchmarks import updates

ARRAYS = {
    "muon | none | jit | update 0": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "muon | none | jit | state": np.array(3),
}
NAME = "muon | none | jit | update 0"


def status(tmp_path, changed):
    for file, arrays in (("old.npz", ARRAYS), ("new.npz", changed)):
        np.savez(tmp_path / file, **arrays)
    return updates.main(["compare", str(tmp_path / "old.npz"), str(tmp_path / "new.npz")])


def test_compare_returns_0_for_equal_files(tmp_path, capsys):
    assert status(tmp_path, ARRAYS) == 0
    assert capsys.readouterr().out == "0 arrays differ, 0 are unmatched\n"


def test_compare_finds_one_changed_bit(tmp_path, capsys):
    changed = ARRAYS[NAME].copy()
    changed.view(np.uint32)[1, 2] ^= 1
    assert status(tmp_path, {**ARRAYS, NAME: changed}) == 1
    out = capsys.readouterr().out
    assert "muon | none | jit: 1 arrays differ, by up to 1.2e-07\n" in out
    assert out.endswith("1 arrays differ, 0 are unmatched\n")


def test_compare_tells_zero_from_minus_zero(tmp_path):
    changed = {**ARRAYS, "zero": np.array(-0.0)}
    np.savez(tmp_path / "a.npz", **{**ARRAYS, "zero": np.array(0.0)})
    np.savez(tmp_path / "b.npz", **changed)
    assert updates.compare(tmp_path / "a.npz", tmp_path / "b.npz") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {NAME: ARRAYS[NAME]},
        {**ARRAYS, "one more": np.array(1)},
        {**ARRAYS, NAME: ARRAYS[NAME].T},
        {**ARRAYS, NAME: ARRAYS[NAME].astype(np.float64)},
    ],
    ids=["missing", "additional", "shape", "dtype"],
)
def test_compare_finds_an_array_without_its_counterpart(tmp_path, capsys, changed):
    assert status(tmp_path, changed) == 1
    assert capsys.readouterr().out.endswith("0 arrays differ, 1 are unmatched\n")
