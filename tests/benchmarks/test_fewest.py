"""`benchmarks.fewest`: where singular values begin to end in one band, and the table."""

import pytest

from benchmarks import fewest
from optax_muonplus import coefficients


@pytest.mark.parametrize(
    "table, steps, lower", [("jordan", 4, 4.9e-3), ("jordan", 5, 1.42e-3), ("cubic", 5, 6.23e-3)]
)
def test_reach_is_where_the_band_begins(table, steps, lower):
    found = fewest.reach(coefficients.for_steps(table, steps).rows, 1.3 / 0.7)
    assert found == pytest.approx(lower, rel=0.01)


def test_table_has_the_fewest_steps_of_each_norm(capsys):
    fewest.main(fewest.Config(shapes=((64, 64), (64, 128))))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = {tuple(cells[:2]): cells[2:] for cells in map(cells_of, lines)}
    assert rows["cubic", "frobenius"][:3] == ["5", "0.0063", "**0.67**"]
    assert rows["jordan", "frobenius"][:3] == ["4", "0.0049", "0.80"]
    assert rows["degree 3", "aol"][0] == "4"


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]
