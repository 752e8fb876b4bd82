"""The first random cases of `tests.random_comparison`, which runs thousands when it is asked to."""

import itertools

import pytest

from optax_muonplus.matrices import Normalize
from tests.random_comparison import compare, compare_many
from tests.support.random_cases import draw


@pytest.mark.parametrize(
    ("cases", "with_mesh"), [(6, False), pytest.param(3, True, marks=pytest.mark.several_devices)]
)
def test_random_cases_agree_with_the_oracle(cases, with_mesh, capsys):
    """Some 10 and 5 seconds. `python -m tests.random_comparison --cases 2000` has more."""
    said = compare_many(0, range(cases), with_mesh)
    with capsys.disabled():
        print(f"\nrandom comparison: {said}")


def test_the_comparison_sees_a_small_mistake(monkeypatch):
    """One hundredth of the normalization, more than any rounding of float32."""
    cases = (draw(0, number, with_mesh=False) for number in itertools.count())
    case = next(
        case
        for case in cases
        if (case.optimizer, case.dtype, case.wrapped) == ("muonplus", "float32", "")
        and case.options["compute_dtype"] is None
        and case.leaves[0].out_axes
    )
    assert compare(case)[0] <= 1
    right = Normalize.__call__
    monkeypatch.setattr(Normalize, "__call__", lambda self, x: right(self, x) * 1.01)
    assert compare(case)[0] > 1
