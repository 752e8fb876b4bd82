"""`benchmarks.change_one_name` compares and resumes; its tables and picture say what it found."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest

from benchmarks import change_one_name, rate_curves
from benchmarks.rate_curves import Run
from examples.trainer.system.errors import UserError

TINY = change_one_name.Config(
    rates=(0.02,), adamw_rates=(0.01,), seeds=(0,), steps=3, batch_size=4, context=8, layers=1,
    width=8, heads=2,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:This figure includes Axes")
def test_every_method_is_trained_once_and_kept(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(TINY, out=tmp_path, picture="svg")
    change_one_name.main(config)
    record = json.loads((tmp_path / "change-one-name-cpu.json").read_text())
    assert record["command"].startswith("python -m benchmarks.change_one_name --rates 0.02")
    losses = {row["method"]: row["validation_loss"] for row in record["rows"]}
    before, adamw, plus, plain, same = losses.values()
    assert list(losses)[:2] == ["optax.contrib.muon", "optax.adamw"]
    assert same == pytest.approx(before, abs=2e-5)  # one update in two libraries
    others = (before, adamw, plus, plain)
    assert all(abs(a - b) > 2e-4 for a, b in itertools.combinations(others, 2))
    assert b"<svg" in (tmp_path / "change-one-name-cpu.svg").read_bytes()

    # A kill after four runs: the fifth alone is done again, with the same loss.
    file = tmp_path / "change-one-name-cpu.json"
    file.write_text(json.dumps(record | {"rows": record["rows"][:-1]}))
    trained = []
    train = change_one_name.Script.train
    monkeypatch.setattr(
        change_one_name.Script, "train", lambda *args: trained.append(args) or train(*args)
    )
    change_one_name.main(config)
    assert len(trained) == 1 and "1 of 5 runs are to be done" in capsys.readouterr().out
    assert json.loads(file.read_text()) == record

    # Another length of training is another run, another grid is not.
    assert len(change_one_name.kept(dataclasses.replace(config, rates=(0.02, 0.04)))) == 5
    assert not change_one_name.kept(dataclasses.replace(config, steps=4))


def test_both_libraries_have_the_same_matrices():
    script = change_one_name.Script(TINY)
    params = script.parameters(0)
    shapes = {}
    methods = [name for name in change_one_name.MUONS if name != change_one_name.PLAIN]
    for method in methods:
        state = script.optimizer(method, 0.02).init(params)
        momenta = [
            leaf.shape
            for path, leaf in jax.tree.leaves_with_path(state)
            if "'muon'" in jax.tree_util.keystr(path) and leaf.ndim > 1
        ]
        shapes[method] = sorted(momenta)
    square, heads = (8, 8), (8, 2, 4)
    expected = sorted([heads] * 3 + [(2, 4, 8), (8, 32), (32, 8)])
    assert square not in shapes["omp.muonplus"]
    assert list(shapes.values()) == [expected] * len(shapes)


def test_a_network_for_digits_is_trained_by_every_method(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs requirements/yardsticks.txt")
    change_one_name.main(dataclasses.replace(TINY, task="cnn", out=tmp_path))
    rows = json.loads((tmp_path / "change-one-name-cnn-cpu.json").read_text())["rows"]
    losses = {row["method"]: row["validation_loss"] for row in rows}
    assert tuple(losses) == change_one_name.OF_DIGITS
    assert all(math.isfinite(loss) for loss in losses.values())
    assert len(set(losses.values())) == len(losses)  # no two are one method
    assert "omp.muonplus, max, row_col" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["mlp", "vit"])
def test_the_other_networks_learn(task):
    pytest.importorskip("sklearn", reason="needs requirements/yardsticks.txt")
    script = change_one_name.Script(dataclasses.replace(TINY, task=task, steps=20, batch_size=32))
    assert script.train(script.optimizer("omp.muonplus", 0.05), 0) < 0.95 * math.log(10)


def test_optax_by_itself_takes_heads_for_matrices_and_no_convolution():
    pytest.importorskip("sklearn", reason="needs requirements/yardsticks.txt")
    script = change_one_name.Script(dataclasses.replace(TINY, task="cnn"))
    params = script.parameters(0)
    shapes = {}
    for method in (change_one_name.PLAIN, change_one_name.BEFORE):
        state = script.optimizer(method, 0.02).init(params)
        found = jax.tree.leaves_with_path(state)
        shapes[method] = {
            leaf.shape for path, leaf in found if "'muon'" in jax.tree_util.keystr(path)
        }
    plain, told = shapes.values()
    assert (64, 10) in plain - told and (3, 3, 16, 32) in told - plain


def test_batches_and_initial_values_belong_to_the_seed():
    script = change_one_name.Script(TINY)
    tx = script.optimizer("omp.muonplus", 0.02)
    assert script.train(tx, 0) == script.train(tx, 0) != script.train(tx, 1)


@pytest.mark.parametrize(
    "change",
    [{"rates": ()}, {"adamw_rates": (0.0,)}, {"steps": 0}, {"heads": 3}, {"batch_size": 4000}],
)
def test_options_without_sense_are_refused(change):
    (name,) = change
    with pytest.raises(UserError, match="--" + name.replace("_", "-")):
        change_one_name.main(dataclasses.replace(TINY, **change))


LOSSES = {
    Run(method, rate, seed): loss + 0.1 * seed
    for method, rate, loss in (
        ("base", 0.1, 3.0), ("base", 0.2, 2.0), ("base", 0.4, math.inf),
        ("other", 0.1, 2.5), ("other", 0.2, 2.25), ("other", 0.4, 2.75),
        ("adam", 0.03, 3.5),
    )
    for seed in (0, 1)
}  # fmt: skip


def printed(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_losses_of_a_rate_are_compared_with_the_base_at_it():
    assert printed(rate_curves.rate_by_rate(LOSSES, "base"))[2:] == [
        ["0.03", "", "", "3.5500"],
        ["0.1", "3.0500", "2.5500 (-0.5000)", ""],
        ["0.2", "2.0500", "2.3000 (+0.2500)", ""],
        ["0.4", "diverged", "2.8000", ""],
    ]


def test_the_best_of_each_seed_is_compared_and_an_end_of_the_grid_is_marked():
    assert printed(rate_curves.best_against_best(LOSSES, "base"))[2:] == [
        ["base", "2.0000 at 0.2", "2.1000 at 0.2", "2.0500", ""],
        ["other", "2.2500 at 0.2 (+0.2500)", "2.3500 at 0.2 (+0.2500)", "2.3000", "+0.2500"],
        ["adam", "3.5000 at 0.03* (+1.5000)", "3.6000 at 0.03* (+1.5000)", "3.5500", "+1.5000"],
    ]


def test_a_diverged_run_is_kept_as_one(tmp_path):
    config, losses = dataclasses.replace(TINY, out=tmp_path), {Run("base", 0.4, 0): math.inf}
    change_one_name.keep(config, losses)
    (file,) = tmp_path.iterdir()
    assert "Infinity" not in file.read_text() and change_one_name.kept(config) == losses


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}'])
def test_a_file_without_losses_is_named(tmp_path, text):
    path = tmp_path / "change-one-name-cpu.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"cpu\.json has no losses of runs .* move it away"):
        change_one_name.kept(dataclasses.replace(TINY, out=tmp_path))


def test_the_picture_leaves_out_what_diverged(tmp_path):
    rate_curves.draw(LOSSES, tmp_path / "curves.png", "rate")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert np.isinf(rate_curves.means(LOSSES, "base")[0.4])
