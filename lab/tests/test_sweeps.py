"""Sweeps: their grids and update rules, and that each run is done once and in full."""

import dataclasses
import json
import math
import os
import signal
import unittest.mock
from typing import get_args

import pytest

import optax_muonplus as omp
from examples.trainer.settings import run as settings
from examples.trainer.settings.command_line import PRESETS
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from lab import sweep
from lab.sweeps import command_line as sweep_command_line
from lab.sweeps import grid, machine, results
from lab.sweeps import run as sweep_run
from lab.sweeps.grid import Grid, Method, Trial
from lab.sweeps.ledger import Ledger, Result
from lab.sweeps.results import MUON
from lab.tests.support.sweep_results import result
from tests.support.imported import Started
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


def rule_of(base, trial):
    """The update rule of a run."""
    return grid.configure(RunConfig(optimizer=base), trial, "runs").optimizer


def test_methods_of_a_grid_and_their_names():
    names = [method.name for method in grid.methods(Grid())]
    assert names == ["AdamW", "Muon", "Muon+ row_col matched norm"]
    many = Grid(
        norms=("row", "col_row"), orthos=("jordan", "cubic", "svd"), frobenius=("free", "matched")
    )
    names = {Trial(m, rate, 0).name for m in grid.methods(many) for rate in (0.1, 0.01)}
    assert len(names) == 2 * (1 + 3 * (1 + 2 * 2))
    assert get_args(settings.Norm) == get_args(omp.matrices.Norm)  # those of the library
    plan = Grid(get_args(settings.Name))
    large = {x.optimizer for x in grid.methods(plan) if grid.rates(plan, x) == plan.adam_rates}
    assert large == {"adamw"}


@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-tiny"])
def test_muonplus_without_flags_is_the_default_of_the_library(preset):
    """Of the trainer too, at the rate of the grid."""
    asked = sweep_command_line.parse([preset])[0]
    (method,) = (m for m in grid.methods(asked.grid) if m.optimizer == "muonplus")
    run = grid.configure(asked.config, Trial(method, 0.02, 0), "runs")
    assert run.optimizer == dataclasses.replace(PRESETS[preset][1].optimizer, learning_rate=0.02)


def test_a_polar_step_says_its_number_of_steps():
    plan = Grid(("muon",), orthos=("jordan", "jordan-3", "cubic-4", "svd"))
    found = [rule_of(OptimizerConfig(), Trial(m, 0.1, 0)) for m in grid.methods(plan)]
    assert [(rule.ns_coeffs, rule.ns_steps, rule.polar) for rule in found] == [
        ("jordan", 5, "auto"),
        ("jordan", 3, "auto"),
        ("cubic", 4, "auto"),
        ("jordan", 5, "svd"),
    ]
    assert [method.name for method in grid.methods(plan)][1:3] == ["Muon jordan-3", "Muon cubic-4"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optimizer.learning-rate 0.1", "values with --grid.rates"),
        ("--optimizer.name adamw", "values with --grid.optimizers"),
        ("--seed 7", "give their number as --grid.seeds"),
        ("--grid.orthos jordan-0", "--grid.orthos jordan-0: give jordan, you"),
    ],
)
def test_impossible_grids_are_refused(flags, words, capsys):
    assert sweep.main([*TOY, *flags.split()]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and not shown.out


def test_the_mean_of_the_first_seeds_chooses_the_rate():
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2), first_seed=7, seeds=3, chosen_by=2)
    first = [Trial(MUON, rate, seed) for rate in plan.rates for seed in (7, 8)]
    losses = dict(zip(first, (1.0, 2.0, 1.3, 1.4), strict=True))  # 0.1 is better by the first alone
    assert list(grid.wanted(plan, losses)) == [*first, Trial(MUON, 0.2, 9)]
    assert grid.count(plan, {}) == 5


def test_a_method_that_diverges_at_all_rates_has_no_further_seeds():
    plan = Grid(optimizers=("muon",), rates=(0.2, 0.1), seeds=3)
    lost = {Trial(MUON, rate, 0): math.inf for rate in plan.rates}
    assert list(grid.wanted(plan, lost)) == list(lost) and grid.count(plan, lost) == 2
    # Of two equally good rates the lower one is the best, in the report too.
    equal = dict.fromkeys(lost, 1.0)
    assert list(grid.wanted(plan, equal))[2].rate == 0.1


def test_a_walk_ends_when_the_best_rate_has_a_neighbour_on_either_side():
    plan = Grid(("muon",), rates=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), seeds=2, start=0.5)
    losses = {}
    while left := [trial for trial in grid.wanted(plan, losses) if trial not in losses]:
        losses[left[0]] = abs(left[0].rate - 0.2)
    order = [(trial.rate, trial.seed) for trial in losses]
    assert order == [(0.4, 0), (0.5, 0), (0.6, 0), (0.3, 0), (0.2, 0), (0.1, 0), (0.2, 1)]
    assert grid.count(plan, losses) == 7 == len(list(grid.wanted(plan, losses)))


def test_a_last_loss_that_is_not_finite_is_the_worst():
    assert Result([(1, math.nan)], None, None, 1.0).loss == math.inf


# Runs


SMALL = ["--grid.optimizers", "muon", "muonplus", "--grid.seeds", "2"]


def run(text, root, *flags):
    toy = [*TOY, "--data.paths", str(text), "--runs-dir", str(root), "--name", "s"]
    return sweep.main([*toy, *SMALL, "--grid.rates", "0.01", "0.02", *flags])


@pytest.fixture(scope="module")
def done(one_device, tmp_path_factory, text):
    """A sweep that was never stopped: 2 methods x (2 rates + 1 seed)."""
    root = tmp_path_factory.mktemp("sweeps")
    build = optimizers.build
    with unittest.mock.patch.object(optimizers, "build", side_effect=build) as built:
        assert run(text, root) == 0
    # For the first state and for the step of each method: rates and seeds share what is compiled.
    # A method is checked without rates of a run before.
    assert sum(len(call.args) == 4 for call in built.call_args_list) == 2 * 2
    return root / "s"


def test_every_run_has_one_line_in_the_ledger(done):
    kept = Ledger(done).results()
    lines = (done / "runs.jsonl").read_text().splitlines()
    assert len(lines) == len(kept) == 6
    for trial, found in kept.items():
        folder = done / "runs" / trial.name
        config = json.loads((folder / "config.json").read_text())["config"]
        assert (config["optimizer"]["learning_rate"], config["seed"]) == (trial.rate, trial.seed)
        assert found.val == list(losses(folder, "val_loss").items())
        assert found.commit == machine.commit() and found.processor == machine.processor()


def test_sweep_runs_equal_runs_of_the_trainer(done, tmp_path, text):
    # Compiled for one rate and given as a number: the same to the last bit.
    flags = ["--optimizer.learning-rate", "0.02", "--seed", "0", "--name", "alone"]
    assert train(text, tmp_path, *flags) == 0
    plus = Method("muonplus", "row_col", "jordan", "matched")
    assert losses(tmp_path / "alone") == losses(done / "runs" / Trial(plus, 0.02, 0).name)


def test_finished_runs_are_skipped(done, text, capsys):
    with unittest.mock.patch.object(sweep_run, "run_trial", side_effect=AssertionError):
        assert run(text, done.parent) == 0
    shown = capsys.readouterr().out
    assert "6 runs, 6 of them done" in shown
    assert shown.endswith(results.table(results.read(done)) + "\n")


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


def test_diverged_runs_are_in_ledger_and_table(tmp_path, text, capsys):
    with losses_are(range(14, 25)):  # of the first run; then the others are as they are
        flags = ["--grid.optimizers", "muon", "--grid.seeds", "1"]
        assert run(text, tmp_path, *flags) == 0
    low, high = (Ledger(tmp_path / "s").results()[Trial(MUON, rate, 0)] for rate in (0.01, 0.02))
    assert low.diverged_at == 24 and low.loss == math.inf
    assert high.diverged_at is None and high.loss < math.log(300)
    assert "diverged" in capsys.readouterr().out


def test_processes_share_the_runs_of_a_sweep(done, tmp_path, text):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "s", *SMALL]
    flags += ["--grid.rates", "0.01", "0.02"]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    processes = [Started("lab.sweep", flags, env, ROOT) for _ in range(2)]
    shown = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len((tmp_path / "s" / "runs.jsonl").read_text().splitlines()) == 6
    assert all("-seed" in lines for lines in shown)  # each did some
    ours, whole = Ledger(tmp_path / "s").losses(), Ledger(done).losses()
    assert ours == whole


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


def test_a_damaged_or_empty_ledger_is_refused(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"method": 3}\n')
    with pytest.raises(UserError, match="Remove the line"):
        results.read(tmp_path)
    (tmp_path / "runs.jsonl").write_text("")
    with pytest.raises(UserError, match="no finished runs"):
        results.read(tmp_path)
