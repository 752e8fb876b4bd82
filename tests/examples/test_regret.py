"""What someone may expect who tries a few rates of a grid."""

import dataclasses
import itertools
import json
import math
import statistics

import pytest

from examples.experiments.sweeps import regret
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.ledger import Ledger
from examples.experiments.sweeps.regret import METHODS
from examples.experiments.sweeps.results import MUON, Sweep
from examples.trainer.settings.run import RunConfig
from tests.support.sweep_results import result

LOSSES = (3.0, 1.0, 2.5, 2.0, 4.0)
RATES = (0.1, 0.2, 0.3, 0.4, 0.5)


@pytest.mark.parametrize("tries", [1, 2, 3, 5])
def test_the_expected_loss_is_the_mean_over_all_sets_of_rates(tries):
    by_sets = [min(drawn) for drawn in itertools.combinations(LOSSES, tries)]
    assert regret.expected(LOSSES, tries) == pytest.approx(statistics.fmean(by_sets))


def test_a_diverged_rate_matters_only_where_it_may_be_kept():
    assert regret.expected((1.0, math.inf, 2.0), 2) == pytest.approx((1 + 1 + 2) / 3)
    assert regret.expected((1.0, math.inf, 2.0), 1) == math.inf
    with pytest.raises(ValueError, match="tries is 4, and there are 3 losses: give 1 to 3"):
        regret.expected((1.0, 2.0, 3.0), 4)


def runs(shift):
    return {
        Trial(method, rate, 0): result(loss + shift * i)
        for i, method in enumerate(METHODS)
        for rate, loss in zip(RATES, LOSSES, strict=True)
    }


def test_the_grid_is_of_rates_that_all_methods_have():
    with_one_more = runs(0.5) | {Trial(MUON, 0.6, 0): result(0.1)}
    found = regret.regret(Sweep("gpt", with_one_more))
    assert found[MUON] == pytest.approx([1.5, 0.8, 0.45, 0])
    assert found[METHODS[2]] == pytest.approx([2.5, 1.8, 1.45, 1])
    few = {trial: x for trial, x in runs(0.5).items() if trial.rate < 0.5}
    assert regret.regret(Sweep("gpt", few)) is None
    assert regret.regret(Sweep("gpt", {Trial(MUON, 0.1, 0): result(1.0)})) is None


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
