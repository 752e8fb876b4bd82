"""What is made of results of sweeps: tables, contrasts, and regret."""

import dataclasses
import itertools
import json
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from examples import contrasts as contrasts_command
from examples.experiments.sweeps import contrasts, figures, regret, results, tables
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.ledger import Ledger, smooth
from examples.experiments.sweeps.regret import METHODS
from examples.experiments.sweeps.report import write_report
from examples.experiments.sweeps.results import ADAMW, MUON, Sweep
from examples.trainer.settings.run import RunConfig
from tests.support.documents import README, ROOT
from tests.support.sweep_results import MATCHED, PLUS, result, toy_sweep

# Tables


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
    row = dataclasses.replace(PLUS, norm="row")
    runs = toy_sweep().results
    for loss, best in ((1.95, PLUS), (1.8, row)):
        sweep = Sweep("toy", runs | {Trial(row, 0.1, 0): result(loss)})
        assert sweep.against_muon() == [best, MATCHED]


def test_figure_of_gains():
    alone = Sweep("alone", {Trial(ADAMW, 0.01, 0): result(2.6)})
    lost = Sweep("lost", {Trial(MUON, 0.1, 0): result(2.0), Trial(PLUS, 0.1, 0): result(math.inf)})
    sweeps = [alone, toy_sweep(), lost]
    assert figures.gaps_of(sweeps, "free") == {1: pytest.approx([-0.1, -0.2])}
    assert figures.gaps_of(sweeps, "matched") == {1: pytest.approx([-0.03])}


def test_curves_are_smoothed_by_means_over_parts():
    curve = [(step, float(step)) for step in range(1, 251)]
    assert smooth(curve)[0] == (2.0, 2.0) and len(smooth(curve)) == 84
    assert smooth(curve[:2]) == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("loss", [800.0, 1e38, math.inf, math.nan])
def test_a_report_of_huge_losses(loss, tmp_path):
    ledger = Ledger(tmp_path)
    for trial in toy_sweep().results:
        ledger.add(trial, result(4.0, loss))
    lines = write_report([tmp_path], tmp_path).read_text().splitlines()
    assert max(map(len, lines)) < 160


def test_tables_of_the_paper():
    e = {x: f"{math.exp(x):.2f}" for x in (1.85, 1.9, 1.95, 1.97, 2.0, 2.5)}
    assert rows(tables.by_rate(toy_sweep())) == [
        ["0.1", e[2.0], f"**{e[1.9]}**"],
        ["0.2", f"**{e[2.5]}**", "diverged"],
    ]
    muon, plus = ((math.exp(x) + math.exp(y)) / 2 for x, y in ((2.0, 2.2), (1.9, 2.0)))
    (norms,) = rows(tables.by_norm([toy_sweep()]))
    assert norms == ["toy", f"{muon:.2f}", "", "", f"{plus:.2f}", ""]
    (polar,) = rows(tables.by_polar([toy_sweep()], ("you", "svd")))
    gap = f"{math.exp(1.85) - math.exp(1.95):+.2f}"
    assert polar == ["toy", "svd", e[1.95], e[1.85], gap, "col_row"]
    (size,) = rows(tables.by_size([toy_sweep()]))
    assert size[1] == "col_row" and size[4] == e[1.97]
    # Means of the seeds: Muon ends at 2.1 after 30 steps, col_row is at 2.1 after 20.
    steps, matched = rows(tables.to_the_same_loss([toy_sweep()]))
    assert steps == ["toy", "2.1000", "30", "col_row", "20", "+50.0%"]
    assert matched == ["toy", "2.1000", "30", "col_row matched norm", "10", "+200.0%"]
    curve = [(10, 4.0), (20, 2.0), (30, 3.0), (40, 1.0)]
    assert [tables.steps_to(curve, x) for x in (3.0, 5.0, 0.5)] == [15, 10, None]


def test_a_method_that_diverged_has_no_final_loss(tmp_path):
    """Seed 1 of Muon stops after 10 of 30 steps; Muon+ is never evaluated."""
    early = dataclasses.replace(result(4.0), diverged_at=15)
    never = dataclasses.replace(result(), diverged_at=5)
    muon = Sweep("toy", toy_sweep().results | {Trial(MUON, 0.1, 1): early})
    assert rows(tables.to_the_same_loss([muon])) == []
    assert {row[0]: row[3] for row in rows(tables.best_of_each(muon))}["Muon"] == "diverged"
    plus = {Trial(MUON, 0.1, 0): result(4.0, 2.0), Trial(PLUS, 0.1, 0): never}
    steps = ["lost", "2.0000", "20", "col_row", "diverged", ""]
    assert rows(tables.to_the_same_loss([Sweep("lost", plus)])) == [steps]
    for trial, found in plus.items():
        Ledger(tmp_path).add(trial, found)
    assert "diverged" in write_report([tmp_path], tmp_path).read_text()


# Contrasts


def test_estimates_are_students():
    values = [0.1, 0.3, 0.2, 0.25]
    given = contrasts.estimate(values)
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    assert given.p == pytest.approx(test.pvalue)
    assert given.mean == pytest.approx(np.mean(values))
    assert given.half_width == pytest.approx((high - low) / 2)
    assert contrasts.estimate([0.1]) == contrasts.Estimate(0.1, math.inf, 1.0, 1)
    for equal in ([0.0, 0.0], [1.0, 1.0], [2.0 - 1.9, 2.1 - 2.0]):  # but for rounding
        assert contrasts.estimate(equal) == contrasts.Estimate(np.mean(equal), 0.0, 1.0, 2)


def test_holms_correction():
    """The example of the method: the smallest times 4, then 3, ..., and never falling."""
    given = contrasts.holm([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(given, [0.03, 0.06, 0.06, 0.02])
    assert contrasts.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.fixture
def sweeps(tmp_path):
    losses = {"gpt": {MUON: (2.0, 2.2, 2.1), PLUS: (1.9, 2.0, 2.0)}, "llama": {PLUS: (1.0, 1.1)}}
    for name, methods in losses.items():
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name)
        for method, found in methods.items():
            ledger.add(Trial(method, 0.5, 0), result(3.0))  # a worse rate
            for seed, loss in enumerate(found):
                ledger.add(Trial(method, 0.1, seed), result(loss))
    return tmp_path


def write(folder, *found):
    path = folder / "contrasts.json"
    path.write_text(json.dumps(found))
    return str(path)


def test_contrasts_of_paired_seeds(sweeps, capsys):
    terms = [[1, "gpt", "Muon+ col_row"], [-1, "gpt", "Muon"]]
    between = [*terms, [-1, "llama", "Muon+ col_row"], [1, "llama", "Muon+ col_row"]]
    path = write(
        sweeps,
        {"name": "norm", "terms": terms, "refuted_if": "above 0"},
        {"name": "between", "terms": between},
    )
    assert contrasts_command.main([path, "--sweeps", str(sweeps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    expected = contrasts.estimate([-0.1, -0.2, -0.1])
    assert cells[0][:2] == ["norm", f"{expected.mean:+.5f} ± {expected.half_width:.5f}"]
    assert cells[0][4:] == ["3", "above 0"]
    assert cells[1][4] == "2"  # the seeds that all have


def test_lines_without_a_spread_are_in_no_correction(sweeps, capsys):
    """Two lines of one name, one of a single seed, and one with a seed that diverged."""
    single, lost = (dataclasses.replace(PLUS, norm=norm) for norm in ("row", "col"))
    for trial, loss in ((Trial(single, 0.1, 0), 1.9), (Trial(lost, 0.1, 0), 1.9)):
        Ledger(sweeps / "gpt").add(trial, result(loss))
    diverged = dataclasses.replace(result(), diverged_at=5)
    Ledger(sweeps / "gpt").add(Trial(lost, 0.1, 1), diverged)
    pairs = ("Muon+ col_row", "Muon"), ("Muon", "Muon+ col_row"), ("Muon+ row", "Muon")
    lines = [
        {"name": "x", "terms": [[1, "gpt", plus], [-1, "gpt", minus]]}
        for plus, minus in (*pairs, ("Muon+ col", "Muon"), ("Muon", "Muon+ col"))
    ]
    assert contrasts_command.main([write(sweeps, *lines), "--sweeps", str(sweeps)]) == 0
    first, second, alone, *last = (row[1:5] for row in rows(capsys.readouterr().out))
    assert first[0].startswith("-0.13333") and second[0].startswith("+0.13333")
    assert first[1:] == second[1:] == ["0.057", "0.11", "3"]  # of two tests
    assert alone == ["-0.10000 ± inf", "", "", "1"]
    assert last == [["diverged", "", "", "2"]] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"frsh": True},
        {"terms": []},
        {"terms": [[1, "gpt", "Muon"]]},
        {"terms": [[math.nan, "gpt", "Muon"]]},
    ],
)
def test_contrasts_that_are_none_are_refused(wrong, tmp_path, capsys):
    right = {"name": "x", "terms": [[1, "gpt", "Muon"], [-1, "gpt", "Muon"]]}
    assert contrasts_command.main([write(tmp_path, right | wrong)]) == 2
    assert "contrasts.json is no list of contrasts: " in capsys.readouterr().err


EXPERIMENTS = ROOT / "results" / "experiments"
# A row of README's table by a word in it: the end of the sweep's name, and the method.
README_ROWS = {
    "RECOMMENDED": ("max-nadam", "Muon+ row_col matched norm"),
    "the default": ("spectral-nadam", "Muon+ col_row"),
    "no normalization": ("max-nadam", "Muon"),
    "as the paper trains": ("spectral", "Muon+ col_row"),
}
README_COLUMNS = (
    ("best_muon/gpt-hold-0.4-0.02", True),
    ("best_muon/llama-hold-0.4-0.03", True),
    ("repeat/gpt", False),
    ("repeat/llama", False),
)


@pytest.mark.parametrize("row", README_ROWS)
def test_differences_in_readme_are_rounded_once_from_the_runs(row):
    lines = [x for x in README.splitlines() if x.startswith("| `omp.") and row in x and "±" in x]
    written = [
        cell.strip(" *").replace("\N{MINUS SIGN}", "-") for cell in lines[0].split("|")[2:-1]
    ]
    sweep, method = README_ROWS[row]
    for cell, (name, fresh) in zip(written, README_COLUMNS, strict=True):
        plus = contrasts.Term(1, f"{name}-{sweep}", method)
        minus = contrasts.Term(-1, f"{name}-max", "Optax Muon")
        found = contrasts.measured(contrasts.Contrast("x", (plus, minus), fresh=fresh), EXPERIMENTS)
        mean = f"{found.mean:+.3f}".replace("+0.000", "0.000")
        assert cell == f"{mean} ± {found.half_width:.3f}", name


def test_fresh_seeds_are_those_that_chose_no_rate(tmp_path):
    (tmp_path / "gpt").mkdir()
    ledger = Ledger(tmp_path / "gpt")
    for rate, found in {0.1: (2.0, 2.6), 0.5: (2.1, 2.2, 1.0, 1.1)}.items():
        for seed, loss in enumerate(found):
            ledger.add(Trial(MUON, rate, seed), result(loss))
    sweep = results.read(tmp_path / "gpt")
    assert sweep.best_rate(MUON) == 0.5 and sweep.fresh(MUON) == {2: 1.0, 3: 1.1}
    terms = (contrasts.Term(1.0, "gpt", "Muon"),)
    values = contrasts.values(contrasts.Contrast("x", terms, fresh=True), {"gpt": sweep})
    assert values == [1.0, 1.1]
    ledger.add(Trial(PLUS, 0.5, 0), result(3.0))  # of one rate no seed has chosen
    assert results.read(tmp_path / "gpt").fresh(PLUS) == {0: 3.0}


def test_what_is_not_there_is_named(sweeps, capsys):
    terms = [[1, "gpt", "Mano"], [-1, "gpt", "Muon"]]
    others = [[1, "other", "Muon"], [-1, "gpt", "Muon"]]
    missing = {"name": "x", "terms": terms}, {"name": "y", "terms": others}
    assert contrasts_command.main([write(sweeps, *missing), "--sweeps", str(sweeps)]) == 0
    shown = capsys.readouterr().out
    assert (
        "| x | gpt has no runs of Mano |" in shown and "| y | other has no runs of Muon |" in shown
    )
    for text in ("[", '[{"terms": [[1, "gpt"]]}]', '[{"name": 1, "terms": []}]', "{}"):
        (sweeps / "bad.json").write_text(text)
        assert contrasts_command.main([str(sweeps / "bad.json")]) == 2
        assert "bad.json is no list of contrasts" in capsys.readouterr().err


# Regret


LOSSES = (3.0, 1.0, 2.5, 2.0, 4.0)


RATES = (0.1, 0.2, 0.3, 0.4, 0.5)


@pytest.mark.parametrize("tries", [1, 2, 3, 5])
def test_the_expected_loss_is_the_mean_over_all_sets_of_rates(tries):
    by_sets = [min(drawn) for drawn in itertools.combinations(LOSSES, tries)]
    assert regret.expected(LOSSES, tries) == pytest.approx(statistics.fmean(by_sets))
    kept = regret.expected((1.0, math.inf, 2.0), min(tries, 2))  # where a diverged one may be kept
    assert kept == (math.inf if tries == 1 else pytest.approx((1 + 1 + 2) / 3))
    with pytest.raises(ValueError, match="tries is 6, and there are 5 losses: give 1 to 5"):
        regret.expected(LOSSES, 6)


def runs(shift):
    return {
        Trial(method, rate, 0): result(loss + shift * i)
        for i, method in enumerate(METHODS)
        for rate, loss in zip(RATES, LOSSES, strict=True)
    }


def test_the_grid_is_of_rates_that_all_methods_have():
    found = regret.regret(Sweep("gpt", runs(0.5) | {Trial(MUON, 0.6, 0): result(0.1)}))
    assert found[MUON] == pytest.approx([1.5, 0.8, 0.45, 0])
    assert found[METHODS[2]] == pytest.approx([2.5, 1.8, 1.45, 1])
    few = {trial: x for trial, x in runs(0.5).items() if trial.rate < 0.5}
    assert regret.regret(Sweep("gpt", few)) is None


def test_the_page_has_a_row_for_each_family_and_method(tmp_path, capsys):
    for name, shift in {"gpt-a": 0.5, "gpt-b": 0.1, "llama": 0.0}.items():
        base = dataclasses.asdict(RunConfig())
        base["model"]["family"] = name.partition("-")[0]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sweep.json").write_text(json.dumps({"base": base}))
        for trial, found in runs(shift).items():
            Ledger(folder).add(trial, found)
    folders = [str(tmp_path / name) for name in ("gpt-a", "gpt-b", "llama")]
    assert regret.main([*folders, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "regret.md").read_text()
    rows = [[x.strip() for x in line.split("|")] for line in page.splitlines() if "Muon" in line]
    cells = {(row[1], row[2]): row[3] for row in rows if len(row) > 3}
    assert len(cells) == 6 and cells["LLaMA, 1", "Muon"] == "+1.500"
    assert cells["GPT, 2", "Muon+ col_row"].startswith("+1.800 ±")  # 1.5, and 0.5 and 0.1 more
    assert (tmp_path / "out" / "regret.png").stat().st_size > 1000
