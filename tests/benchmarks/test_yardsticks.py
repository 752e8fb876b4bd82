"""`benchmarks.yardsticks`: the tasks are those that were published, and rows are kept."""

import json
import math

import jax
import numpy as np
import pytest

from benchmarks.yardsticks import least_squares, mnist1d, resuming, tiny_shakespeare
from examples.trainer.system.errors import UserError
from tests.support.documents import ROOT

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


@pytest.mark.parametrize(
    ("change", "count"), [({}, 2), ({"cosine": False}, 0), ({"steps": 1000, "cosine": False}, 2)]
)
def test_published_figures_stand_beside_runs_of_their_kind_only(change, count):
    assert len(least_squares.published(least_squares.Config(**change))) == count


@pytest.mark.parametrize(("cosine", "end"), [(True, "svd"), (False, "svd-constant")])
def test_tables_with_a_cosine_and_without_have_files_of_their_own(cosine, end, monkeypatch):
    names = []
    monkeypatch.setattr(resuming, "measured", lambda out, name, *rest: names.append(name) or [])
    monkeypatch.setattr(least_squares, "table", lambda rows, config: "")
    least_squares.main(least_squares.Config(cosine=cosine))
    assert names == [f"least-squares-25-2-{end}"]


def test_rows_that_an_equal_run_has_written_are_kept(tmp_path):
    seen, tasks = [], [{"name": name} for name in "abc"]

    def measure(name):
        if name == "c" and len(seen) < 3:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(name)
        return {"length": 1}

    with pytest.raises(KeyboardInterrupt):
        resuming.measured(tmp_path, "x", {"rates": (1, 2)}, tasks, measure)
    rows = resuming.measured(tmp_path, "x", {"rates": (1, 2)}, tasks, measure)
    assert seen == ["a", "b", "killed", "c"] and [row["name"] for row in rows] == ["a", "b", "c"]
    rows = resuming.measured(tmp_path, "x", {"rates": (1, 2)}, [{"name": "d"}, *tasks[1:]], measure)
    assert seen[4:] == ["d"] and [row["name"] for row in rows] == ["d", "b", "c"]
    names = [row["name"] for row in resuming.kept(tmp_path / "x.json", {"rates": (1, 2)})]
    assert names == ["d", "b", "c", "a"]  # what a smaller table leaves out stays
    resuming.measured(tmp_path, "x", {"rates": (1,)}, tasks, measure)
    assert seen[5:] == ["a", "b", "c"]  # another record has none of them
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match=r"x\.json has no rows of a table .* move it away"):
        resuming.measured(tmp_path, "x", {}, tasks, measure)


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
    # The frozen file, greydanus/mnist1d @7878d96, mnist1d_data.pkl, has these.
    assert [data.x[0, 0], data.x_test[-1, -1]] == pytest.approx([-0.3320057, 1.1931518], abs=1e-6)


def test_the_committed_runs_of_tiny_shakespeare_go_on_under_the_default_folder():
    """As their page says: a sweep with other paths of data would be refused as another one."""
    config = tiny_shakespeare.Config()
    folder = config.runs_dir / tiny_shakespeare.NAME
    entry = tiny_shakespeare.ENTRIES["AdamW"]
    data = tiny_shakespeare.run_config(entry, 0.004, config, folder).data
    sweeps = sorted((ROOT / "results/benchmarks/yardsticks/tiny-shakespeare").glob("*/sweep.json"))
    assert sweeps
    for sweep in sweeps:
        found = json.loads(sweep.read_text())["base"]["data"]
        assert (tuple(found["paths"]), found["tokenizer"]) == (data.paths, data.tokenizer)
