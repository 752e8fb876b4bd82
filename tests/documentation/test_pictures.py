"""Pictures that are files are those that the drawings give today, and say what they mean."""

import pytest

from docs.drawings import DRAWINGS
from docs.drawings.regret import regrets
from tests.support.documents import ROOT


@pytest.mark.parametrize("name", ["chain", "gains"])
def test_pictures_of_the_readme_are_drawn_from_the_results(name):
    written = (ROOT / "docs" / "_static" / f"{name}.svg").read_text()
    assert written == DRAWINGS[name]().svg() + "\n", "python -m docs.drawings writes it again"


def test_who_tries_more_rates_gets_a_lower_loss():
    for curves in map(regrets, ("gpt", "llama")):
        assert all(values == sorted(values, reverse=True) for values in curves.values())
        assert curves["Muon"][-1] >= 0
