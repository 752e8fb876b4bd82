"""The plan of the runs against the best Muon, and what its stages decide."""

import itertools

import pytest

from examples.experiments.best_muon import plan, stages
from examples.experiments.best_muon.plan import Cell, Choice
from examples.experiments.sweeps.grid import Method, Trial
from examples.experiments.sweeps.results import ADAMW, MUON, Sweep
from tests.support.sweep_results import result

CELL = Cell("gpt", "hold-0.4", 0.03)


def test_neighbours_are_one_step_away():
    looked = [
        [4.1, "gpt", "hold-0.4", 0.03, 0.02],
        [4.2, "gpt", "linear", 0.02, 0.02],
        [4.3, "gpt", "cosine", 0.03, 0.02],
        [4.4, "gpt", "linear", 0.03, 0.02],
    ]
    found = plan.neighbours(CELL, looked)
    assert found == [
        CELL._replace(second=0.02),
        CELL._replace(second=0.045),
        CELL._replace(schedule="cosine"),
    ]
    assert len(plan.neighbours(CELL._replace(second=0.01), [[4.0, *CELL[:2], 0.01, 0.02],
        [4.1, "gpt", "linear", 0.01, 0.02]])) == 2  # fmt: skip


def test_every_line_of_the_table_is_a_difference_of_fresh_seeds():
    best = Choice(CELL, "max", "Muon", 0.02)
    lines = list(plan.contrasts(best, [CELL._replace(second=0.02)], 0.01))
    assert lines[0]["refuted_if"] == "above -0.01" and not any(x["refuted_if"] for x in lines[1:])
    assert len({line["name"] for line in lines}) == len(lines) == 16 + 4 + 1 + 1 + 3
    for line in lines:
        (plus, _, _), (minus, _, muon) = line["terms"]
        assert (plus, minus, muon, line["fresh"]) == (1, -1, "Muon", True)
    assert lines[0]["terms"][0] == [1, "gpt-hold-0.4-0.03-max", "Muon+ row_col"]
    assert len(list(plan.contrasts(best, [], None))) == 21


@pytest.fixture
def losses(monkeypatch):
    """Runs nothing: a loss is lowest at rate 0.02, second rate 0.03 and the schedule hold-0.4."""
    asked = []

    def run(root, cell, shape, start, seeds, flags):
        asked.append((cell, shape, seeds))
        schedule = 0.02 * [*plan.SCHEDULES].index(cell.schedule)
        base = 4 + abs(schedule - 0.04) + abs(cell.second - 0.03) + 0.01 * ("spectral" in shape)
        rules = [MUON, Method("optax_muon")] if "optax_muon" in flags else [MUON]
        rules = [ADAMW] if "adamw" in flags else rules
        trials = itertools.product(rules, (0.014, 0.02, 0.028), range(seeds))
        found = {Trial(*trial): result(base + abs(trial[1] - 0.02)) for trial in trials}
        return Sweep("made up", found)

    monkeypatch.setattr(stages, "run", run)
    return asked


def test_the_first_look_keeps_cells_that_are_near_the_best(tmp_path, losses):
    found = stages.look(tmp_path, "gpt")
    assert len(found["all"]) == 16 == len(losses)
    kept = [tuple(entry[1:4]) for entry in found["kept"]]
    assert kept[0] == ("gpt", "hold-0.4", 0.03) and len(kept) == plan.MOST
    assert all(entry[0] <= 4 + plan.CLOSE for entry in found["kept"])
    best = stages.best_muon(tmp_path, "gpt", found["kept"])
    assert Choice(Cell(*best[1:4]), *best[4:]) == Choice(CELL, "max", "Muon", 0.02)
    assert stages.adamw(tmp_path, CELL) == [0.03]


def test_a_decision_stays(tmp_path):
    assert stages.decided(tmp_path, "a", lambda: [1]) == [1]
    assert stages.decided(tmp_path, "b", lambda: [2]) == [2]
    assert stages.decided(tmp_path, "a", lambda: [3]) == [1]

    def slow():
        """Another process decides this and something else meanwhile."""
        stages.decided(tmp_path, "c", lambda: [4])
        stages.decided(tmp_path, "d", lambda: [5])
        return [6]

    assert stages.decided(tmp_path, "c", slow) == [4]
    assert stages.decided(tmp_path, "d", lambda: [7]) == [5]
