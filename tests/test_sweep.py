"""Sweeps: which runs there are, that each is done once and in full, and what the tables say."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import unittest.mock
from typing import get_args

import jax
import numpy as np
import pytest
import reference
from filelock import FileLock
from rich.console import Console
from test_examples import ROOT, TOY, losses, losses_are, stop_at
from test_trainer_sharding import curve

from examples import command, figures, grid, optimizers, sharding, sweep, tables, train
from examples import report as reports
from examples.config import OptimizerConfig
from examples.data.prepare import prepare
from examples.errors import UserError
from examples.grid import Cell, Grid, Method
from examples.job import assemble
from examples.ledger import Ledger, Result, smooth
from examples.sweep_display import SweepDisplay
from examples.tables import ADAMW, MUON, Sweep

EVERYTHING = Grid(orthos=("jordan", "you", "polar_express", "svd"), frobenius=("free", "matched"))
PLUS = Method("muonplus", "col_row", "jordan", "free")
MATCHED = dataclasses.replace(PLUS, frobenius="matched")
SMALL = ["--grid.optimizers", "muon", "muonplus", "--grid.norms", "col_row", "--grid.seeds", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with unittest.mock.patch.object(jax, "devices", return_value=jax.devices()[:1]):
        yield


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
    assert built.call_count == 2 * 2
    return root / "s"


# The grid


def test_methods():
    assert [method.name for method in grid.methods(Grid())] == [
        "AdamW",
        "Muon",
        "Muon+ col",
        "Muon+ row",
        "Muon+ col_row",
        "Muon+ row_col",
    ]
    assert len(list(grid.methods(EVERYTHING))) == 1 + 4 * (1 + 4 * 2)
    names = {Cell(m, rate, 0).name for m in grid.methods(EVERYTHING) for rate in (0.1, 0.01)}
    assert len(names) == 2 * 37


def test_further_seeds_are_run_at_the_best_rate():
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2, 0.3), seeds=3)
    first = [Cell(MUON, rate, 0) for rate in plan.rates]
    losses = dict(zip(first, (2.0, 1.0, math.inf), strict=True))
    assert list(grid.wanted(plan, {first[0]: 2.0})) == first
    assert list(grid.wanted(plan, losses)) == [*first, Cell(MUON, 0.2, 1), Cell(MUON, 0.2, 2)]
    assert grid.count(plan) == 5


@pytest.mark.parametrize("method", list(grid.methods(EVERYTHING)), ids=lambda method: method.name)
def test_one_step_of_every_method(method):
    rng = np.random.default_rng(0)
    kernel, table = rng.normal(size=(12, 6)), rng.normal(size=(3, 6))
    base = OptimizerConfig(weight_decay=0.1, clip_norm=None, nesterov=False)
    config = grid.optimizer(base, EVERYTHING, Cell(method, 0.03, 0))
    params = {"up": {"kernel": kernel}, "wte": {"embedding": table}}
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    grads = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params)
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    betas = {"b1": base.adam_b1, "b2": base.adam_b2}
    g, rate = grads["wte"]["embedding"], base.adam_learning_rate
    expected, *_ = reference.adamw_step(table, 0.0, 0.0, g, 1, learning_rate=rate, **betas)
    np.testing.assert_allclose(updates["wte"]["embedding"], expected, rtol=1e-5, atol=1e-7)
    w, g = kernel.T, grads["up"]["kernel"].T.astype(float)
    if method == ADAMW:
        options = {"learning_rate": 0.03, "weight_decay": 0.1, **betas}
        expected, *_ = reference.adamw_step(w, 0.0, 0.0, g, 1, **options)
    else:
        expected, _ = reference.muonplus_step(
            w,
            np.zeros_like(w),
            g,
            1,
            learning_rate=0.03,
            table=method.ortho,
            norm=method.norm or "none",
            match_frobenius=method.frobenius == "matched",
            weight_decay=0.1,
        )
    error = np.linalg.norm(updates["up"]["kernel"].T - expected) / np.linalg.norm(expected)
    assert error < 1e-5


SEVERAL = [
    *grid.methods(Grid(get_args(grid.Optimizer))),
    MUON,
    dataclasses.replace(MUON, ortho="svd"),
    MATCHED,
]


@pytest.mark.parametrize("method", dict.fromkeys(SEVERAL), ids=lambda method: method.name)
def test_loss_falls_with_every_method(method, text):
    config = command.parse([*TOY, "--data.paths", str(text)])[0].config
    rate = 0.02 if method.optimizer not in ("adamuon", "mano") else 0.005
    rule = grid.optimizer(config.optimizer, Grid(), Cell(method, rate, 0))
    mesh = sharding.make_mesh("", jax.devices()[:1])
    config = dataclasses.replace(config, optimizer=rule)
    losses = curve(assemble(config, prepare(config.data, lambda line: None), mesh), steps=10)
    assert losses[-1] < losses[0] - 0.15


def test_rates_of_updates_of_adamws_size():
    plan = Grid(get_args(grid.Optimizer))
    for method in grid.methods(plan):
        large = method.optimizer in ("adamw", "adamuon", "mano")
        assert grid.rates(plan, method) == (plan.adam_rates if large else plan.rates)


def test_same_rate_for_all():
    cell = Cell(PLUS, 0.06, 0)
    base = OptimizerConfig(adam_learning_rate=0.5)
    assert grid.optimizer(base, Grid(), cell).adam_learning_rate == 0.5
    assert grid.optimizer(base, Grid(same_rate=True), cell).adam_learning_rate == 0.06


def test_recipes_have_the_rates_of_the_paper():
    plan = command.parse_sweep(["llama-60m"])[0].grid
    assert plan.rates == (0.005, 0.01, 0.02, 0.04, 0.06, 0.08) and plan.same_rate
    assert command.parse_sweep(["gpt-small-muon"])[0].grid.rates == (0.003, 0.005, 0.01, 0.02, 0.04)
    assert not command.parse_sweep([])[0].grid.same_rate


# Runs


def test_every_run_is_noted_once(done):
    results = Ledger(done).results()
    lines = (done / "runs.jsonl").read_text().splitlines()
    assert len(lines) == len(results) == 6
    for cell, result in results.items():
        folder = done / "runs" / cell.name
        config = json.loads((folder / "config.json").read_text())["config"]
        assert (config["optimizer"]["learning_rate"], config["seed"]) == (cell.rate, cell.seed)
        assert result.val == list(losses(folder, "val_loss").items())
        assert [loss for _, loss in result.train] == list(losses(folder).values())
    assert "## s: each method at its best rate" in (done / "report.md").read_text()
    for name in ("rates", "curves", "gains", "stability"):
        assert (done / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_those_of_the_trainer(done, tmp_path, text):
    # Compiled for one rate and given as a number: the same to the last bit.
    flags = ["--optimizer.learning-rate", "0.02", "--seed", "0", "--name", "alone"]
    assert train.main([*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), *flags]) == 0
    assert losses(tmp_path / "alone") == losses(done / "runs" / Cell(PLUS, 0.02, 0).name)


def test_finished_runs_are_skipped(done, text, capsys):
    with unittest.mock.patch.object(sweep, "run_cell", side_effect=AssertionError):
        assert run(text, done.parent) == 0
    assert "6 runs, 6 of them done" in capsys.readouterr().out


def test_a_larger_grid_goes_on(done, tmp_path, text):
    with unittest.mock.patch.object(sweep, "run_cell", side_effect=UserError("a run")) as ran:
        assert run(text, done.parent, "--grid.rates", "0.01", "0.02", "0.04") == 2
    assert ran.call_args.args[0] == Cell(MUON, 0.04, 0)


def test_a_stopped_sweep_goes_on(done, tmp_path, text, capsys):
    with stop_at(13, lambda: signal.raise_signal(signal.SIGINT)):
        assert run(text, tmp_path) == 130
    assert "the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "s" / "runs.jsonl").exists()
    assert run(text, tmp_path, "--grid.optimizers", "muon", "--grid.seeds", "1") == 0
    ours, whole = Ledger(tmp_path / "s").results(), Ledger(done).results()
    assert len(ours) == 2
    assert all(
        dataclasses.replace(r, seconds=whole[c].seconds) == whole[c] for c, r in ours.items()
    )


def test_diverged_runs_are_noted(tmp_path, text, capsys):
    with losses_are(range(14, 25)):  # of the first run; then the others are as they are
        flags = ["--max-skipped", "10", "--grid.optimizers", "muon", "--grid.seeds", "1"]
        assert run(text, tmp_path, *flags) == 0
    low, high = (Ledger(tmp_path / "s").results()[Cell(MUON, rate, 0)] for rate in (0.01, 0.02))
    assert low.diverged_at == 24 and low.loss == math.inf
    assert high.diverged_at is None and high.loss < math.log(300)
    assert "diverged" in capsys.readouterr().out
    assert "diverged" in (tmp_path / "s" / "report.md").read_text()


def test_processes_share_a_sweep(done, tmp_path, text):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path), "--name", "s", *SMALL]
    flags += ["--grid.rates", "0.01", "0.02"]
    call = [sys.executable, "-m", "examples.sweep", *flags]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(call, cwd=ROOT, env=env, stdout=subprocess.PIPE) for _ in range(2)
    ]
    shown = [process.communicate(timeout=120)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len((tmp_path / "s" / "runs.jsonl").read_text().splitlines()) == 6
    assert all("-seed" in lines for lines in shown)  # each did some
    ours, whole = Ledger(tmp_path / "s").losses(), Ledger(done).losses()
    assert ours == whole


def test_a_locked_run_is_left_to_its_process(done, tmp_path):
    ledger = Ledger(tmp_path)
    (tmp_path / "locks").mkdir()
    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2))
    display = unittest.mock.Mock()
    with FileLock(tmp_path / "locks" / Cell(MUON, 0.1, 0).name):
        claimed = sweep.claim(plan, tmp_path, ledger, display)
    assert claimed and claimed[0] == Cell(MUON, 0.2, 0)
    claimed[1].release()


def test_a_run_that_another_process_finished_meanwhile(tmp_path):
    class Late(Ledger):
        """Another process writes down a run right after it was first looked at."""

        def losses(self):
            seen = super().losses()
            if not seen:
                self.add(Cell(MUON, 0.1, 0), result(2.0))
            return seen

    plan = Grid(optimizers=("muon",), rates=(0.1, 0.2))
    (cell, lock) = sweep.claim(plan, tmp_path, Late(tmp_path), unittest.mock.Mock())
    assert cell == Cell(MUON, 0.2, 0)
    lock.release()


def test_the_live_table_ends_with_all_that_is_done(tmp_path):
    shown, ledger = io.StringIO(), Ledger(tmp_path)
    console = Console(file=shown, force_terminal=True, width=100)
    with SweepDisplay(console, Grid(optimizers=("muon",), rates=(0.1, 0.2)), ledger) as display:
        display.show("a run")
        ledger.add(Cell(MUON, 0.1, 0), result(2.5))
        ledger.add(Cell(MUON, 0.2, 0), result(2.0))
    assert re.search(r"Muon +2 +0\.2 +2\.0000 +1", shown.getvalue())


# What a person can get wrong


def error_of(capsys, *argv):
    assert sweep.main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optimizer.learning-rate", "0.1"], "values with --grid.rates"),
        (["--optimizer.name", "adamw"], "values with --grid.optimizers"),
        (["--grid.rates", "0.1", "0.1"], "give each once"),
        (["--grid.rates"], "--grid.rates is empty"),
        (["--grid.rates", "0"], "give numbers above 0"),
        (["--grid.seeds", "0"], "--grid.seeds is 0"),
        (["--model.n-head", "3"], "--model.n-head"),
    ],
)
def test_what_cannot_be(flags, words, capsys):
    assert words in error_of(capsys, *TOY, *flags)


def test_another_sweep_in_the_folder(done, text, capsys):
    assert run(text, done.parent, "--steps", "25") == 2
    assert "which has another base.steps" in capsys.readouterr().err


def test_a_sweep_begun_before_a_setting_came(done, tmp_path, text):
    shutil.copytree(done, tmp_path / "s")
    plan = json.loads((done / "sweep.json").read_text())
    del plan["base"]["optimizer"]["record_every"]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(plan))
    assert run(text, tmp_path) == 0


def test_damaged_ledger(tmp_path, capsys):
    (tmp_path / "runs.jsonl").write_text('{"method": 3}\n')
    assert reports.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "Remove the line" in capsys.readouterr().err
    (tmp_path / "runs.jsonl").write_text("")
    assert reports.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no finished runs" in capsys.readouterr().err


# Tables


def result(*val):
    steps = [10 * (i + 1) for i in range(len(val))]
    points = list(zip(steps, val, strict=True))
    return Result(points, [(float(s), x) for s, x in points], 1.0, None, 1.0)


def made():
    """Muon ends at 2.0 and 2.2 after 30 steps; col_row is there after 20, and goes on."""
    svd = dataclasses.replace(MUON, ortho="svd")
    runs = {
        Cell(MUON, 0.1, 0): result(4.0, 3.0, 2.0),
        Cell(MUON, 0.1, 1): result(4.0, 3.0, 2.2),
        Cell(MUON, 0.2, 0): result(4.0, 3.0, 2.5),
        Cell(PLUS, 0.1, 0): result(4.0, 2.0, 1.9),
        Cell(PLUS, 0.1, 1): result(4.0, 2.2, 2.0),
        Cell(PLUS, 0.2, 0): dataclasses.replace(result(4.0), diverged_at=12),
        Cell(svd, 0.1, 0): result(1.95),
        Cell(dataclasses.replace(PLUS, ortho="svd"), 0.1, 0): result(1.85),
        Cell(MATCHED, 0.1, 0): result(1.97),
        Cell(ADAMW, 0.01, 0): result(4.0, 3.0, 2.6),
    }
    return Sweep("toy", runs)


def rows(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()][2:]


def test_table_of_best():
    found = {row[0]: row for row in rows(tables.best_of_each(made()))}
    assert found["Muon"][1:3] == ["0.1*", "2.1000 ± 0.1414"]
    # Seed by seed, -0.1 and -0.2: mean -0.15, deviation 0.0707.
    assert found["Muon+ col_row"][4:] == ["-0.1500 ± 0.0707", "2"]
    assert found["AdamW"][1] == "0.01"  # a single rate is no edge
    mean = (math.exp(2.0) + math.exp(2.2)) / 2
    assert found["Muon"][3].startswith(f"{mean:.2f} ±")


def test_table_of_gains():
    alone = Sweep("alone", {Cell(ADAMW, 0.01, 0): result(2.6)})
    found = rows(tables.gains([made(), alone]))
    muon, plus = ["0.1*", "2.1000 ± 0.1414"], ["0.1*", "1.9500 ± 0.0707"]
    assert found == [
        ["toy", *muon, *plus, "col_row", "-0.1500 ± 0.0707"],
        ["toy", *muon, "0.1", "1.9700", "col_row matched norm", "-0.0300"],
    ]


def test_the_best_norm_is_that_of_the_lowest_loss():
    runs = made().results | {Cell(dataclasses.replace(PLUS, norm="row"), 0.1, 0): result(1.95)}
    assert Sweep("toy", runs).against_muon() == [PLUS, MATCHED]
    runs |= {Cell(dataclasses.replace(PLUS, norm="row"), 0.1, 0): result(1.8)}
    best, _ = Sweep("toy", runs).against_muon()
    assert best.norm == "row"


def test_figure_of_gains():
    alone = Sweep("alone", {Cell(ADAMW, 0.01, 0): result(2.6)})
    lost = Sweep("lost", {Cell(MUON, 0.1, 0): result(2.0), Cell(PLUS, 0.1, 0): result(math.inf)})
    sweeps = [alone, made(), lost]
    assert figures.gaps_of(sweeps, "free") == {1: pytest.approx([-0.1, -0.2])}
    assert figures.gaps_of(sweeps, "matched") == {1: pytest.approx([-0.03])}


def test_many_panels_are_wrapped():
    figure, (above, below) = figures.panels([made()] * 7, rows=2)
    assert len(above) == len(below) == 7 and len(figure.axes) == 14
    place = [axes.get_subplotspec().rowspan.start for axes in (above[4], below[4], above[5])]
    assert place == [0, 1, 2]
    assert len(figures.panels([made()])[0].axes) == 1


def test_table_of_rates_and_norms():
    e = {x: f"{math.exp(x):.2f}" for x in (2.0, 1.9, 2.5)}
    assert rows(tables.by_rate(made())) == [
        ["0.1", e[2.0], f"**{e[1.9]}**"],
        ["0.2", f"**{e[2.5]}**", "diverged"],
    ]
    ((name, none, *norms),) = rows(tables.by_norm([made()]))
    assert (name, none) == ("toy", f"{(math.exp(2.0) + math.exp(2.2)) / 2:.2f}")
    assert norms == ["", "", f"{(math.exp(1.9) + math.exp(2.0)) / 2:.2f}", ""]


def test_tables_of_polar_steps_and_sizes():
    ((_, ortho, muon, plus, gap, norm),) = rows(tables.by_polar([made()], ("you", "svd")))
    assert (ortho, norm) == ("svd", "col_row")
    assert (muon, plus) == (f"{math.exp(1.95):.2f}", f"{math.exp(1.85):.2f}")
    assert float(gap) == pytest.approx(math.exp(1.85) - math.exp(1.95), abs=0.005)
    (row,) = rows(tables.by_size([made()]))
    assert row[1] == "col_row" and row[4] == f"{math.exp(1.97):.2f}"


def test_steps_to_a_loss():
    # Means of the seeds: Muon ends at 2.1 after 30 steps, col_row is at 2.1 after 20.
    (row,) = rows(tables.to_the_same_loss([made()]))
    assert row == ["toy", "2.1000", "30", "col_row", "20", "+50.0%"]
    curve = [(10, 4.0), (20, 2.0), (30, 3.0), (40, 1.0)]
    assert tables.steps_to(curve, 3.0) == 15
    assert tables.steps_to(curve, 5.0) == 10
    assert tables.steps_to(curve, 0.5) is None


def test_a_title_for_each_table_that_has_rows():
    titles = [title for title, _ in tables.sections([made()])]
    assert "Perplexity with the exact polar factor" in titles
    assert "Perplexity by polynomial, each at its best rate" not in titles


def test_smooth():
    curve = [(step, float(step)) for step in range(1, 251)]
    assert smooth(curve)[0] == (2.0, 2.0) and len(smooth(curve)) == 84
    assert smooth([]) == []
    assert smooth(curve[:2]) == [(1, 1.0), (2, 2.0)]
