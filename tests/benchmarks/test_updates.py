"""`benchmarks.updates compare` finds every difference between two files of updates."""

import numpy as np
import pytest

from benchmarks import updates

NAME = "muon | none | jit | update 0"
ARRAY = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
ARRAYS = {NAME: ARRAY, "muon | none | jit | state": np.array(0.0)}
ONE_BIT = ARRAY.copy()
ONE_BIT.view(np.uint32)[1, 2] ^= 1
BY = "muon | none | jit: 1 arrays differ, by up to 1.2e-07\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (ARRAYS, "0 arrays differ, 0 are unmatched\n"),
        ({**ARRAYS, NAME: ONE_BIT}, BY + "1 arrays differ, 0 are unmatched\n"),
        ({**ARRAYS, "muon | none | jit | state": np.array(-0.0)}, "1 arrays differ, 0 are unm"),
        ({NAME: ARRAY}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, "one more": np.array(1)}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, NAME: ARRAY.T}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, NAME: ARRAY.astype(np.float64)}, "0 arrays differ, 1 are unmatched\n"),
    ],
    ids=["equal", "one bit", "minus zero", "missing", "additional", "shape", "dtype"],
)
def test_compare_says_what_differs(tmp_path, capsys, changed, said):
    for file, arrays in (("old.npz", ARRAYS), ("new.npz", changed)):
        np.savez(tmp_path / file, **arrays)
    files = [str(tmp_path / file) for file in ("old.npz", "new.npz")]
    assert updates.main(["compare", *files]) == (changed is not ARRAYS)
    assert said in capsys.readouterr().out
