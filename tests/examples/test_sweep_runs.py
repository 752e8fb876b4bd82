"""Sweeps: each run is done once and in full, by one process or several."""

import dataclasses
import json
import math
import os
import shutil
import signal
import unittest.mock

import pytest
from filelock import FileLock

from examples import report, sweep
from examples.experiments.sweeps import run as sweep_run
from examples.experiments.sweeps.grid import Grid, Trial
from examples.experiments.sweeps.ledger import Ledger
from examples.experiments.sweeps.results import MUON
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, program
from tests.support.imported import Started
from tests.support.sweep_results import PLUS, result
from tests.support.trainer import (
    PATIENCE,
    ROOT,
    TOY,
    losses,
    losses_are,
    stop_at,
    train,
)

pytestmark = pytest.mark.usefixtures("one_device")

SMALL = ["--grid.optimizers", "muon", "muonplus", "--grid.norms", "col_row", "--grid.seeds", "2"]


def run(text, root, *flags):
    toy = [*TOY, "--data.paths", str(text), "--runs-dir", str(root), "--name", "s"]
    return sweep.main([*toy, *SMALL, "--grid.rates", "0.01", "0.02", *flags])


@pytest.fixture(scope="module")
def done(one_device, tmp_path_factory, text):
    """A sweep that was never stopped: 2 methods x (2 rates + 1 seed)."""
    root = tmp_path_factory.mktemp("sweeps")
    build = optimizers.build
    program.make_program.cache_clear()  # the trainer's own, which is not that of other tests
    with (
        unittest.mock.patch.object(program, "make_program", program.make_program),
        unittest.mock.patch.object(optimizers, "build", side_effect=build) as built,
    ):
        assert run(text, root) == 0
    # For the first state and for the step of each method: rates and seeds share what is compiled.
    assert built.call_count == 2 * 2
    return root / "s"


def test_every_run_has_one_line_in_the_ledger(done):
    results = Ledger(done).results()
    lines = (done / "runs.jsonl").read_text().splitlines()
    assert len(lines) == len(results) == 6
    for trial, found in results.items():
        folder = done / "runs" / trial.name
        config = json.loads((folder / "config.json").read_text())["config"]
        assert (config["optimizer"]["learning_rate"], config["seed"]) == (trial.rate, trial.seed)
        assert found.val == list(losses(folder, "val_loss").items())
        assert [loss for _, loss in found.train] == list(losses(folder).values())
    assert "## s: each method at its best rate" in (done / "report.md").read_text()
    for name in ("rates", "curves", "gains"):
        assert (done / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_runs_equal_runs_of_the_trainer(done, tmp_path, text):
    # Compiled for one rate and given as a number: the same to the last bit.
    flags = ["--optimizer.learning-rate", "0.02", "--seed", "0", "--name", "alone"]
    assert train(text, tmp_path, *flags) == 0
    assert losses(tmp_path / "alone") == losses(done / "runs" / Trial(PLUS, 0.02, 0).name)


def test_finished_runs_are_skipped(done, text, capsys):
    with unittest.mock.patch.object(sweep_run, "run_trial", side_effect=AssertionError):
        assert run(text, done.parent) == 0
    assert "6 runs, 6 of them done" in capsys.readouterr().out


def test_larger_grid_continues_with_the_new_runs(done, tmp_path, text):
    with unittest.mock.patch.object(sweep_run, "run_trial", side_effect=UserError("a run")) as ran:
        assert run(text, done.parent, "--grid.rates", "0.01", "0.02", "0.04") == 2
    assert ran.call_args.args[0] == Trial(MUON, 0.04, 0)


def test_stopped_sweep_continues_to_the_same_results(done, tmp_path, text, capsys):
    with stop_at(13, lambda: signal.raise_signal(signal.SIGINT)):
        assert run(text, tmp_path) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert not (tmp_path / "s" / "runs.jsonl").exists()
    assert run(text, tmp_path, "--grid.optimizers", "muon", "--grid.seeds", "1") == 0
    ours, whole = Ledger(tmp_path / "s").results(), Ledger(done).results()
    assert len(ours) == 2
    assert all(
        dataclasses.replace(r, seconds=whole[c].seconds) == whole[c] for c, r in ours.items()
    )


def test_diverged_runs_are_in_ledger_and_report(tmp_path, text, capsys):
    with losses_are(range(14, 25)):  # of the first run; then the others are as they are
        flags = ["--max-skipped", "10", "--grid.optimizers", "muon", "--grid.seeds", "1"]
        assert run(text, tmp_path, *flags) == 0
    low, high = (Ledger(tmp_path / "s").results()[Trial(MUON, rate, 0)] for rate in (0.01, 0.02))
    assert low.diverged_at == 24 and low.loss == math.inf
    assert high.diverged_at is None and high.loss < math.log(300)
    assert "diverged" in capsys.readouterr().out
    assert "diverged" in (tmp_path / "s" / "report.md").read_text()


def test_processes_share_the_runs_of_a_sweep(done, tmp_path, text):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "s", *SMALL]
    flags += ["--grid.rates", "0.01", "0.02"]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    processes = [Started("examples.sweep", flags, env, ROOT) for _ in range(2)]
    shown = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len((tmp_path / "s" / "runs.jsonl").read_text().splitlines()) == 6
    assert all("-seed" in lines for lines in shown)  # each did some
    ours, whole = Ledger(tmp_path / "s").losses(), Ledger(done).losses()
    assert ours == whole


def test_locked_run_is_not_claimed(done, tmp_path):
    ledger = Ledger(tmp_path)
    (tmp_path / "locks").mkdir()
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2))
    display = unittest.mock.Mock()
    with FileLock(tmp_path / "locks" / Trial(MUON, 0.1, 0).name):
        claimed = sweep_run.claim(plan, tmp_path, ledger, display)
    assert claimed and claimed[0] == Trial(MUON, 0.2, 0)
    claimed[1].release()


def test_run_finished_by_another_process_is_not_claimed(tmp_path):
    class Late(Ledger):
        """Another process writes down a run right after it was first looked at."""

        def losses(self):
            seen = super().losses()
            if not seen:
                self.add(Trial(MUON, 0.1, 0), result(2.0))
            return seen

    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2))
    (trial, lock) = sweep_run.claim(plan, tmp_path, Late(tmp_path), unittest.mock.Mock())
    assert trial == Trial(MUON, 0.2, 0)
    lock.release()


def test_folder_of_another_sweep_is_refused(done, text, capsys):
    assert run(text, done.parent, "--steps", "25") == 2
    assert "which has another base.steps" in capsys.readouterr().err


def test_sweep_older_than_a_setting_continues(done, tmp_path, text):
    shutil.copytree(done, tmp_path / "s")
    plan = json.loads((done / "sweep.json").read_text())
    del plan["base"]["optimizer"]["record_every"]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(plan))
    assert run(text, tmp_path) == 0


def test_report_refuses_a_damaged_or_empty_ledger(tmp_path, capsys):
    (tmp_path / "runs.jsonl").write_text('{"method": 3}\n')
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "Remove the line" in capsys.readouterr().err
    (tmp_path / "runs.jsonl").write_text("")
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no finished runs" in capsys.readouterr().err


def error_of(capsys, *argv):
    assert sweep.main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer.learning-rate", "0.1"], "values with --grid.rates"),
        (["--optimizer.name", "adamw"], "values with --grid.optimizers"),
        (["--grid.rates", "0.1", "0.1"], "each once"),
        (["--grid.rates"], "--grid.rates is empty"),
        (["--grid.orthos", "jordan-0"], "--grid.orthos jordan-0: give jordan, you"),
        (["--grid.rates", "0"], "--grid.rates is 0.0: it should be greater than 0"),
        (["--grid.seeds", "0"], "--grid.seeds is 0"),
        (["--model.n-head", "3"], "--model.n-head"),
    ],
)
def test_impossible_grids_are_refused(flags, words, capsys):
    assert words in error_of(capsys, *TOY, *flags)
