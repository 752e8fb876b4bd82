"""`benchmarks.change_one_name`: its matrices in both libraries, and the tables of its losses."""

import dataclasses
import math

import jax

from benchmarks import change_one_name, rate_curves
from benchmarks.rate_curves import Run

TINY = change_one_name.Config(
    rates=(0.02,), adamw_rates=(0.01,), seeds=(0,), steps=3, batch_size=4, context=8, layers=1,
    width=8, heads=2,
)  # fmt: skip


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


LOSSES = {
    Run(method, rate, seed): loss + 0.1 * seed
    for method, rate, loss in (
        ("base", 0.1, 3.0), ("base", 0.2, 2.0), ("base", 0.4, math.inf),
        ("other", 0.1, 2.5), ("other", 0.2, 2.25), ("other", 0.4, 2.75),
        ("adam", 0.03, 3.5),
    )
    for seed in (0, 1)
}  # fmt: skip


def test_a_smaller_grid_keeps_the_losses_of_a_larger_one(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, out=tmp_path, rates=(0.1, 0.2), seeds=(0, 1))
    monkeypatch.setattr(change_one_name.Script, "__init__", lambda *_: None)
    monkeypatch.setattr(change_one_name.Script, "optimizer", lambda *_: None)
    monkeypatch.setattr(change_one_name.Script, "train", lambda *_: 1.5)
    every = change_one_name.measure(config)
    assert len(change_one_name.measure(dataclasses.replace(config, seeds=(1,)))) < len(every)
    assert change_one_name.kept(config).keys() == every.keys()


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
