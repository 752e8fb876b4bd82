"""The paper's figures from toy runs: numbers against NumPy, claims, and missing data."""

import dataclasses
import json
import unittest.mock

import numpy as np
import pytest

from examples import paper_figures, sweep
from examples.experiments.paper import claims, curvature, records
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.results import MUON, Sweep, read
from examples.experiments.theory.regions import composed_regions
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.runs.metrics import MATRICES, read_metrics
from examples.trainer.system.errors import UserError
from tests.support import reference
from tests.support.sweep_results import PLUS, result
from tests.support.trainer import (
    TOY,
)

pytestmark = pytest.mark.usefixtures("one_device")

RECORDED = ["--optimizer.record-every", "12", "--optimizer.weight-decay", "0"]

GRID = ["--grid.optimizers", "muon", "muonplus", "normuon", "--grid.norms", "col_row"]

GRID += ["--grid.rates", "0.02"]


@pytest.fixture(scope="module")
def recorded(one_device, tmp_path_factory, text):
    root = tmp_path_factory.mktemp("recorded")
    flags = ["--data.paths", str(text), "--runs-dir", str(root), "--name", "s"]
    assert sweep.main([*TOY, *flags, *RECORDED, *GRID]) == 0
    return root / "s"


@pytest.fixture(scope="module")
def figures(recorded, tmp_path_factory):
    out = tmp_path_factory.mktemp("figures") / "not" / "there"
    flags = ["--sweeps", str(recorded), "--layer", "0", "--no-curvature"]
    assert paper_figures.main([str(recorded), "--out", str(out), *flags]) == 0
    return out


def data(figures, name):
    return json.loads((figures / f"{name}.json").read_text())


def test_every_figure_has_numbers_and_a_picture(figures):
    names = {"iterations", "training", "ranks", "regions", "entries", "stability"}
    assert {path.stem for path in figures.glob("*.json")} == names
    assert {path.stem for path in figures.glob("*.png")} == names
    for path in figures.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_variance_by_iterations(recorded, figures):
    muon = records.of(MUON, records.read(recorded))
    step, moments = records.momenta(muon, None)
    assert step == 24
    (x,) = np.asarray(moments["down"], np.float64)
    assert x.shape == (16, 64)  # (out, in), as the paper has it, of a kernel (in, out)
    found = data(figures, "iterations")["down"]
    assert found["shape"] == [16, 64]
    for steps, row, col in zip(range(6), found["row"], found["col"], strict=False):
        y = reference.newton_schulz(x, steps=steps) if steps else x / np.linalg.norm(x)
        squares = y**2
        assert row == pytest.approx(squares.sum(1).var(), rel=2e-3)
        assert col == pytest.approx(squares.sum(0).var(), rel=2e-3)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    held = s > 64 * np.finfo(np.float32).eps * s[0]  # a toy's momentum has directions of rounding
    exact = (u[:, held] @ vt[held]) ** 2
    assert found["exact_col"] == pytest.approx(exact.sum(0).var(), rel=2e-3)
    assert found["exact_row"] == pytest.approx(exact.sum(1).var(), rel=2e-3, abs=1e-10)


def test_entries_equal_the_oracle(recorded, figures):
    muon = records.of(MUON, records.read(recorded))
    (x,) = np.asarray(records.momenta(muon, None)[1]["up"], np.float64)
    found = data(figures, "entries")
    update = reference.newton_schulz(x, steps=5)
    np.testing.assert_allclose(found["Muon"], np.abs(update), atol=2e-3)
    rows = np.linalg.norm(found["Muon+ col_row"], axis=1)
    np.testing.assert_allclose(rows, 1, atol=2e-3)


def test_relative_variance_does_not_see_the_size_of_updates(recorded):
    by_method = {own.method.name: own for own in records.read(recorded)}
    muon, rival = by_method["Muon"], by_method["NorMuon"]
    assert muon.steps == [12, 24]
    for own in (muon, rival):
        assert 1e-4 < own.relative_variance("qkv", "row").max() < 10
    stage = dataclasses.replace(muon)
    for name in muon.values:
        if name.startswith("up/update"):
            power = 4 if "variance" in name else 1
            stage.values[name] = muon.values[name] * 3.0**power
    again = records.read_run(muon.folder, muon.method).relative_variance("up", "col")
    np.testing.assert_allclose(stage.relative_variance("up", "col"), again, rtol=1e-6)
    record = read_metrics(muon.folder / MATRICES)[0]["values"]["blocks/0/mlp/up/kernel"]
    mean = 64 * record["update/rms"] ** 2  # of 16 columns of 64 entries each
    assert again[0, 0] == pytest.approx(record["update/col_variance"] / mean**2, rel=1e-6)


def test_regions_equal_those_of_theory(figures):
    found = data(figures, "regions")["Jordan"]
    assert found["steps"][0]["amplification"] == [
        pytest.approx(interval) for interval in composed_regions("jordan", 1).amplification
    ]
    assert len(found["composed"]) == 5 and len(found["slopes"]) == 1
    assert found["slopes"][0][0] == pytest.approx(3.4445**2, rel=1e-5)


def test_claims_of_toy_runs(figures):
    lines = (figures / "claims.md").read_text().splitlines()
    rows = {cells[1].strip(): cells[2:4] for cells in (line.split("|") for line in lines[2:])}
    seen, numbers = rows["Muon+ has no variance in the side normalized last, throughout training"]
    assert seen.strip() == "yes" and float(numbers.split()[-1]) < 1e-6
    one_side = rows["other layers: one side stays unequal even with the exact factor"]
    assert "of qkv, up, down" in one_side[1]
    assert "NorMuon leaves imbalance" in rows


def test_claims_that_do_not_hold_are_answered_no():
    losses = {(MUON, 0.01): 2.0, (MUON, 0.02): 2.1, (PLUS, 0.01): 2.2, (PLUS, 0.02): 2.0}
    runs = {Trial(m, rate, 0): result(loss) for (m, rate), loss in losses.items()}
    stable, lower = claims.in_sweep(Sweep("s", runs))
    assert stable[1] and "Muon 0.1000" in stable[2] and "Muon+ col_row 0.0000" in stable[2]
    assert not lower[1] and "+0.0000" in lower[2]
    bounds = {"mean_curvature": 1.0, "decrease": 1.0}
    flat = dict.fromkeys(curvature.NORMS, bounds) | {
        "row": {"mean_curvature": 0.5, "decrease": 2.0}
    }
    sides = {side: {"blocks/0/x/kernel": flat} for side in curvature.SIDES}
    (row, _) = claims.flatter({**sides, "layer": 0, "step": 1})
    assert not row[1] and "row 0.500 (lower in 1 of 1; guaranteed decrease 2.000)" in row[2]


@pytest.mark.parametrize(("gaps", "seen"), [((0.1, 0.11, 0.12), True), ((0.1, 0.5, -0.3), False)])
def test_a_lower_loss_is_one_beyond_two_standard_errors(gaps, seen):
    runs = {Trial(MUON, 0.01, i): result(2.0) for i in range(3)}
    runs |= {Trial(PLUS, 0.01, i): result(2.0 - gap) for i, gap in enumerate(gaps)}
    *_, lower = claims.in_sweep(Sweep("s", runs))
    assert lower[1] == seen


def test_curvature_along_updates(recorded):
    (trial, *_) = [trial for trial in read(recorded).results if trial.method == MUON]
    checkpoint = CheckpointRef(recorded / "runs" / trial.name, 16)
    with (
        unittest.mock.patch.object(curvature, "SIDES", ("row",)),
        unittest.mock.patch.object(curvature, "NORMS", ("none", "row")),
        unittest.mock.patch.object(curvature, "ITERATIONS", 2),
        unittest.mock.patch.object(curvature, "MATRICES", "^blocks/{layer}/attn/qkv"),
    ):
        found = curvature.compare(checkpoint, 0)
    assert found["step"] == 16 and list(found["row"]) == ["blocks/0/attn/qkv/kernel"]
    for norms in found["row"].values():
        assert set(norms) == {"none", "row"}
        for numbers in norms.values():
            assert numbers["mean_curvature"] > 0 and numbers["decrease"] > 0


def test_missing_matrices_runs_and_records_are_named(recorded, tmp_path, capsys):
    def error_of(*flags):
        assert paper_figures.main([*flags, "--out", str(tmp_path), "--no-curvature"]) == 2
        return capsys.readouterr().err

    assert "choose among qkv 0 to 0" in error_of(str(recorded), "--kind", "head", "--layer", "0")
    methods = records.read(recorded)
    with pytest.raises(UserError, match=r"Muon\+ col_row's: add .* muonplus --grid.norms col_row"):
        records.of(PLUS, [own for own in methods if own.method == MUON])
    assert "there are those of" in error_of(str(recorded), "--step", "3")
    (muon,) = [trial for trial in read(recorded).results if trial.method == MUON]
    (recorded / "runs" / muon.name / MATRICES).rename(tmp_path / "kept")
    try:
        assert "train with --optimizer.record-every" in error_of(str(recorded))
    finally:
        (tmp_path / "kept").rename(recorded / "runs" / muon.name / MATRICES)
