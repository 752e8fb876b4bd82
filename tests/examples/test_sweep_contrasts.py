"""Differences between methods of several sweeps, with intervals."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from examples import contrasts as command
from examples.experiments.sweeps import contrasts, results
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.ledger import Ledger
from examples.experiments.sweeps.results import MUON
from tests.support.sweep_results import PLUS, result


def test_estimates_are_students():
    values = [0.1, 0.3, 0.2, 0.25]
    given = contrasts.estimate(values)
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    assert given.p == pytest.approx(test.pvalue)
    assert given.mean == pytest.approx(np.mean(values))
    assert given.half_width == pytest.approx((high - low) / 2)
    assert contrasts.estimate([0.1]) == contrasts.Estimate(0.1, math.inf, 1.0, 1)
    assert contrasts.estimate([0.0, 0.0]).p == 1 and contrasts.estimate([1.0, 1.0]).p == 0


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
    assert command.main([path, "--sweeps", str(sweeps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    expected = contrasts.estimate([-0.1, -0.2, -0.1])
    assert cells[0][:2] == ["norm", f"{expected.mean:+.4f} ± {expected.half_width:.4f}"]
    assert cells[0][4:] == ["3", "above 0"]
    assert cells[1][4] == "2"  # the seeds that all have


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
    missing = {"name": "x", "terms": terms}, {"name": "y", "terms": [[1, "other", "Muon"]]}
    assert command.main([write(sweeps, *missing), "--sweeps", str(sweeps)]) == 0
    shown = capsys.readouterr().out
    assert (
        "| x | gpt has no runs of Mano |" in shown and "| y | other has no runs of Muon |" in shown
    )
    for text in ("[", '[{"terms": [[1, "gpt"]]}]', '[{"name": 1, "terms": []}]', "{}"):
        (sweeps / "bad.json").write_text(text)
        assert command.main([str(sweeps / "bad.json")]) == 2
        assert "bad.json is no list of contrasts" in capsys.readouterr().err
