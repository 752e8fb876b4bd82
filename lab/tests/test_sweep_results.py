"""What is made of results of sweeps: tables and contrasts."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from examples.trainer.system.errors import UserError
from lab import contrasts as contrasts_command
from lab.sweeps import contrasts, results
from lab.sweeps.grid import Method, Trial
from lab.sweeps.ledger import Ledger
from lab.sweeps.results import MUON, Sweep
from lab.tests.support.sweep_results import PLUS, result, rows, toy_sweep

# Tables


def test_table_of_best_rates():
    found = {row[0]: row for row in rows(results.table(toy_sweep()))}
    assert found["Muon"][1:3] == ["0.1*", "2.1000 ± 0.1414"]
    # Seed by seed, -0.1 and -0.2: mean -0.15, deviation 0.0707.
    assert found["Muon+ col_row"][3:] == ["-0.1500 ± 0.0707", "2"]
    assert found["AdamW"][1] == "0.01"  # a single rate is no edge


def test_a_method_that_diverged_has_no_final_loss():
    """Seed 1 of Muon stops after 10 of 30 steps."""
    early = dataclasses.replace(result(4.0), diverged_at=15)
    muon = Sweep("toy", toy_sweep().results | {Trial(MUON, 0.1, 1): early})
    assert {row[0]: row[2] for row in rows(results.table(muon))}["Muon"] == "diverged"


def test_a_ledger_may_have_curves_and_a_rule_of_an_earlier_trainer(tmp_path):
    method = dataclasses.asdict(Method("muown"))
    line = {"method": method, "rate": 0.1, "seed": 0, "val": [[10, 2.0]], "train": [[5.0, 3.0]]}
    line |= {"bits_per_byte": None, "diverged_at": None, "seconds": 1.0}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    sweep = results.read(tmp_path)
    assert [m.name for m in sweep.methods()] == ["Muown"]
    assert sweep.best(Method("muown")) == {0: 2.0}


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
        {"terms": [[1, "gpt", "Muon"]]},
    ],
)
def test_contrasts_that_are_none_are_refused(wrong, tmp_path, capsys):
    right = {"name": "x", "terms": [[1, "gpt", "Muon"], [-1, "gpt", "Muon"]]}
    assert contrasts_command.main([write(tmp_path, right | wrong)]) == 2
    assert "contrasts.json is no list of contrasts: " in capsys.readouterr().err


def test_a_pooled_mean_is_that_of_paule_and_mandel_with_hartung_and_knapps_interval():
    """Three cells of one error, in closed form: tau^2 is their variance less the error's square."""
    y, error = np.array([-0.02, -0.01, 0.003]), 0.004
    found = contrasts.pooled(y, [error] * 3)
    deviation = np.std(y, ddof=1)
    assert found.mean == pytest.approx(np.mean(y))
    assert found.tau == pytest.approx(math.sqrt(deviation**2 - error**2))
    test = stats.ttest_1samp(y, 0)
    low, high = test.confidence_interval(0.95)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert found.p == pytest.approx(test.pvalue)
    spread = math.sqrt(found.tau**2 + deviation**2 / 3)
    assert found.new_cell == pytest.approx(stats.t.ppf(0.975, 1) * spread)


def test_cells_that_vary_less_than_their_errors_have_no_tau():
    y, errors = np.array([-0.0101, -0.01, -0.0099]), np.array([0.004, 0.002, 0.008])
    found = contrasts.pooled(y, errors)
    assert found.tau == 0
    assert found.mean == pytest.approx(np.average(y, weights=1 / errors**2))
    with pytest.raises(UserError, match="three or more"):
        contrasts.pooled([0.1, 0.2], [0.1, 0.1])


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
