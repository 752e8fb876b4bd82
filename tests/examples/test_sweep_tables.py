"""Tables and figures of sweeps, from made-up results."""

import dataclasses
import math

import pytest

from examples.experiments.sweeps import figures as sweep_figures
from examples.experiments.sweeps import tables
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.ledger import Ledger, smooth
from examples.experiments.sweeps.report import write_report
from examples.experiments.sweeps.results import ADAMW, MUON, Sweep
from tests.support.sweep_results import MATCHED, PLUS, result, toy_sweep


def rows(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()][2:]


def test_table_of_best_rates():
    found = {row[0]: row for row in rows(tables.best_of_each(toy_sweep()))}
    assert found["Muon"][1:3] == ["0.1*", "2.1000 ± 0.1414"]
    # Seed by seed, -0.1 and -0.2: mean -0.15, deviation 0.0707.
    assert found["Muon+ col_row"][4:] == ["-0.1500 ± 0.0707", "2"]
    assert found["AdamW"][1] == "0.01"  # a single rate is no edge
    mean = (math.exp(2.0) + math.exp(2.2)) / 2
    assert found["Muon"][3].startswith(f"{mean:.2f} ±")


def test_table_of_gains():
    alone = Sweep("alone", {Trial(ADAMW, 0.01, 0): result(2.6)})
    found = rows(tables.gains([toy_sweep(), alone]))
    muon, plus = ["0.1*", "2.1000 ± 0.1414"], ["0.1*", "1.9500 ± 0.0707"]
    assert found == [
        ["toy", *muon, *plus, "col_row", "-0.1500 ± 0.0707"],
        ["toy", *muon, "0.1", "1.9700", "col_row matched norm", "-0.0300"],
    ]


def test_the_best_norm_is_that_of_the_lowest_loss():
    runs = toy_sweep().results | {
        Trial(dataclasses.replace(PLUS, norm="row"), 0.1, 0): result(1.95)
    }
    assert Sweep("toy", runs).against_muon() == [PLUS, MATCHED]
    runs |= {Trial(dataclasses.replace(PLUS, norm="row"), 0.1, 0): result(1.8)}
    best, _ = Sweep("toy", runs).against_muon()
    assert best.norm == "row"


def test_figure_of_gains():
    alone = Sweep("alone", {Trial(ADAMW, 0.01, 0): result(2.6)})
    lost = Sweep("lost", {Trial(MUON, 0.1, 0): result(2.0), Trial(PLUS, 0.1, 0): result(math.inf)})
    sweeps = [alone, toy_sweep(), lost]
    assert sweep_figures.gaps_of(sweeps, "free") == {1: pytest.approx([-0.1, -0.2])}
    assert sweep_figures.gaps_of(sweeps, "matched") == {1: pytest.approx([-0.03])}


@pytest.mark.parametrize("loss", [800.0, 1e38, math.inf, math.nan])
def test_a_report_of_huge_losses(loss, tmp_path):
    ledger = Ledger(tmp_path)
    for trial in toy_sweep().results:
        ledger.add(trial, result(4.0, loss))
    lines = write_report([tmp_path], tmp_path).read_text().splitlines()
    assert max(map(len, lines)) < 160


def test_many_panels_are_wrapped():
    figure, (above, below) = sweep_figures.panels([toy_sweep()] * 7, rows=2)
    assert len(above) == len(below) == 7 and len(figure.axes) == 14
    place = [axes.get_subplotspec().rowspan.start for axes in (above[1], below[1], above[2])]
    assert place == [0, 1, 2]
    assert len(sweep_figures.panels([toy_sweep()])[0].axes) == 1


def test_table_of_rates_and_norms():
    e = {x: f"{math.exp(x):.2f}" for x in (2.0, 1.9, 2.5)}
    assert rows(tables.by_rate(toy_sweep())) == [
        ["0.1", e[2.0], f"**{e[1.9]}**"],
        ["0.2", f"**{e[2.5]}**", "diverged"],
    ]
    ((name, none, *norms),) = rows(tables.by_norm([toy_sweep()]))
    assert (name, none) == ("toy", f"{(math.exp(2.0) + math.exp(2.2)) / 2:.2f}")
    assert norms == ["", "", f"{(math.exp(1.9) + math.exp(2.0)) / 2:.2f}", ""]


def test_tables_of_polar_steps_and_sizes():
    ((_, ortho, muon, plus, gap, norm),) = rows(tables.by_polar([toy_sweep()], ("you", "svd")))
    assert (ortho, norm) == ("svd", "col_row")
    assert (muon, plus) == (f"{math.exp(1.95):.2f}", f"{math.exp(1.85):.2f}")
    assert float(gap) == pytest.approx(math.exp(1.85) - math.exp(1.95), abs=0.005)
    (row,) = rows(tables.by_size([toy_sweep()]))
    assert row[1] == "col_row" and row[4] == f"{math.exp(1.97):.2f}"


def test_steps_to_a_loss():
    # Means of the seeds: Muon ends at 2.1 after 30 steps, col_row is at 2.1 after 20.
    (row,) = rows(tables.to_the_same_loss([toy_sweep()]))
    assert row == ["toy", "2.1000", "30", "col_row", "20", "+50.0%"]
    curve = [(10, 4.0), (20, 2.0), (30, 3.0), (40, 1.0)]
    assert tables.steps_to(curve, 3.0) == 15
    assert tables.steps_to(curve, 5.0) == 10
    assert tables.steps_to(curve, 0.5) is None


def test_empty_tables_are_left_out():
    titles = [title for title, _ in tables.sections([toy_sweep()])]
    assert "Perplexity with the exact polar factor" in titles
    assert "Perplexity by polynomial, each at its best rate" not in titles


def test_curves_are_smoothed_by_means_over_parts():
    curve = [(step, float(step)) for step in range(1, 251)]
    assert smooth(curve)[0] == (2.0, 2.0) and len(smooth(curve)) == 84
    assert smooth([]) == []
    assert smooth(curve[:2]) == [(1, 1.0), (2, 2.0)]
