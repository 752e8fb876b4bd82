"""Runs at once: the ledger is that of the same sweep, run by run."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples import sweep
from examples.experiments.sweeps import at_once, command_line
from examples.experiments.sweeps.ledger import Ledger
from examples.trainer.data.loader import Loader
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import RunConfig
from tests.support.trainer import TOY

pytestmark = pytest.mark.usefixtures("one_device")

GRID = ["--grid.optimizers", "muon", "muonplus", "--grid.norms", "col_row"]
RATES = ["--grid.rates", "0.01", "0.02", "--grid.seeds", "2"]


def ledger_of(main, flags, folder):
    """The ledger that a command line writes."""
    assert main([*TOY, "--name", "found", "--runs-dir", str(folder), *flags]) == 0
    return Ledger(folder / "found").results()


def test_the_ledger_is_that_of_the_sweep_and_finished_runs_are_not_repeated(tmp_path, capsys):
    flags = [*GRID, *RATES, "--steps", "7", "--eval-every", "3", "--batch-size", "96"]
    flags += ["--eval-batches", "100000", "--data.max-bytes", "100000"]  # the last one is not full
    one_by_one = ledger_of(sweep.main, flags, tmp_path / "sweep")
    together = ledger_of(at_once.main, flags, tmp_path / "at_once")
    assert together.keys() == one_by_one.keys() and len(together) == 2 * (2 + 1)
    for trial, expected in one_by_one.items():
        found = together[trial]
        assert [step for step, _ in found.val] == [3, 6, 7] == [step for step, _ in expected.val]
        assert np.allclose(found.val, expected.val, atol=2e-4)
        assert np.allclose(found.train, expected.train, atol=2e-4)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, abs=1e-3)
        assert found.diverged_at is None
    capsys.readouterr()
    assert ledger_of(at_once.main, flags, tmp_path / "at_once") == together
    assert "at once" not in capsys.readouterr().out
    lines = (tmp_path / "at_once" / "found" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == len(together)


def test_a_seed_that_is_asked_for_later_is_added(tmp_path, capsys):
    flags = [*GRID[:2], "--grid.rates", "0.01", "--steps", "2"]
    before = ledger_of(sweep.main, flags, tmp_path)
    more = ledger_of(at_once.main, [*flags, "--grid.seeds", "2"], tmp_path)
    assert len(before) == 1 and len(more) == 2
    assert "2 runs at once" in capsys.readouterr().out
    assert len((tmp_path / "found" / "runs.jsonl").read_text().splitlines()) == 2  # each once


def test_a_run_that_diverges_is_recorded_as_such(tmp_path):
    flags = ["--optimizer.adam-learning-rate", "1e38", "--optimizer.clip-norm", "None"]
    steps = ["--steps", "14", "--eval-every", "1"]
    found = ledger_of(at_once.main, [*GRID[:2], "--grid.rates", "0.01", *flags, *steps], tmp_path)
    (result,) = found.values()
    assert result.diverged_at is not None and result.loss == np.inf
    assert result.bits_per_byte is None
    assert all(np.isfinite(loss) for _, loss in result.train)


@pytest.mark.parametrize(("first", "last", "diverged_at"), [(40, 40, None), (10, 34, 20)])
def test_a_run_diverges_where_the_trainer_would_stop(first, last, diverged_at):
    """One skipped step at the end is none too many; of 25 in the middle the eleventh is."""
    train = np.ones(40)
    train[first - 1 : last] = np.nan
    dataset: Any = SimpleNamespace(val=SimpleNamespace(meta=SimpleNamespace(tokens=1, bytes=1)))
    val = [(5, 4.0), (20, 3.0), (40, 2.9)]
    found = at_once.result_of(train, val, RunConfig(), dataset, 1.0)
    assert found.diverged_at == diverged_at
    assert found.val == (val[:1] if diverged_at else val)
    assert len(found.train) == (9 if diverged_at else 39)


def test_a_mesh_is_refused(capsys, tmp_path):
    assert at_once.main([*TOY, "--runs-dir", str(tmp_path), "--mesh", "data=1"]) == 2
    assert "--mesh: runs at once do not have this" in capsys.readouterr().err


def test_windows_begin_where_the_trainer_reads_them():
    asked = command_line.parse([*TOY])[0]
    config = dataclasses.replace(asked.config, seed=3)
    dataset = prepare(config.data, print)
    found = at_once.starts_of_runs(dataset, [config, config], range(40, 43))
    loader = Loader(dataset.train.ids, config.model.context, config.batch_size, 3)
    for n, step in enumerate(range(40, 43)):
        inputs, _ = loader.batch(step)
        for run in found[n]:
            read = [dataset.train.ids[i : i + config.model.context] for i in run]
            assert np.array_equal(read, inputs)
