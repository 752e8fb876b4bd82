"""`benchmarks.step`, `polar` and `trainer` run on tiny models and write every figure."""

import json
import unittest.mock

import jax
import numpy as np
import pytest

from benchmarks import (
    checkpoints,
    heads,
    polar,
    products,
    step,
    timing,
    trainer,
    training_step,
    trees,
)


def test_step_writes_every_figure(tmp_path):
    step.main(step.Config(layers=1, width=16, vocabulary=20, rounds=2, out=tmp_path))
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert result["command"] == (
        "python -m benchmarks.step --layers 1 --width 16 --vocabulary 20 --rounds 2"
    )
    assert {"device", "processor", "jax", "optax_muonplus"} <= result["machine"].keys()
    rows = result["rows"]
    assert list(rows)[:2] == ["optax.adamw", "optax.contrib.muon"]
    assert [name for name in rows if "muonplus" in name] == [
        f"omp.muonplus, {norm}" for norm in ("col", "row", "col_row", "row_col")
    ]
    for name, row in rows.items():
        assert row["median_s"] > 0 and row["compile_s"] > 0 and row["temporary_bytes"] > 0
        assert ("share_of_products" in row) == (name != "optax.adamw")
    # float32: one buffer for the 12 * 16^2 elements of matrices, two for other elements, a count.
    others = 16 * 20 + 3 * 16
    assert rows["omp.muonplus, row"]["state_bytes"] == 4 * (12 * 16**2 + 2 * others + 1)
    # Both compute the same update from the same gradients.
    assert result["largest_difference"] < 1e-4


def test_heads_are_compared_with_whole_kernels(tmp_path):
    small = {"gpt-384": trees.Size(16, 2, 32, False)}
    with unittest.mock.patch.dict(trees.SIZES, small):
        heads.main(heads.Config("gpt-384", head_size=4, scanned=True, rounds=2, out=tmp_path))
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert [row["parameters"] for row in rows] == ["attention"] * 3 + ["all"] * 3
    assert rows[0]["of_whole"] == 1 and min(row["of_whole"] for row in rows) > 0


def test_work_counts_the_operations_of_plain_and_gram_newton_schulz():
    """Per layer of width d: 30 d^3 for each square, 50 d^3 for each 1:4 under Gram, else 90 d^3."""
    size = trees.SIZES["gpt-384"]._replace(layers=2)
    per_product = dict.fromkeys([(384, 384, 384), (384, 1536, 384), (384, 384, 1536)], 1.0)
    for polar_method, cube in (("auto", 4 * 30 + 2 * 50), ("newton_schulz", 4 * 30 + 2 * 90)):
        work = step.work(size, None, polar_method, per_product, seconds=1.0)
        assert work["gflop"] * 1e9 == 2 * cube * 384**3
    # Each product takes a second here: 4 * 15 + 2 * (15 plain).
    assert work["share_of_products"] == 2 * (4 * 15 + 2 * 15)


def test_product_chains_keep_the_norm_and_count_their_products():
    for n, m in ((8, 8), (8, 24)):
        chain = products.chain(n, m, np.float32, batch=2)
        norm = np.linalg.norm(np.asarray(chain.run()), axis=(-2, -1))
        np.testing.assert_allclose(norm, np.sqrt(n), rtol=1e-4)
        assert sum(chain.products.values()) == 2 * 32 * (2 if m > n else 1)


def test_a_round_times_every_program_once():
    order = []
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.interleaved(programs, 3)
    assert order == list("ab" * 4)  # the first round is not timed
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_several_calls_of_a_round_are_timed_together(monkeypatch):
    order = []
    clock = iter([0.0, 6.0, 10.0, 19.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.interleaved(programs, 1, calls=3)
    assert order == list("ab" + "aaabbb")
    assert {name: list(values) for name, values in seconds.items()} == {"a": [2.0], "b": [3.0]}


@pytest.mark.filterwarnings("ignore:This figure includes Axes")
def test_polar_writes_table_and_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(polar, "RUNS", (("jordan", 5), ("turbo", 4), ("cans", 5)))
    polar.main(polar.Config(short=8, long=16, count=2, rounds=1, out=tmp_path))
    rows = json.loads((tmp_path / "polar-8x16-cpu.json").read_text())["rows"]
    assert len(rows) == 1 + 3 * 3 - 1  # cans has no bfloat16 form
    exact = rows[0]
    assert exact["method"] == "svd" and exact["log-spaced"]["distance"] < 1e-3
    for row in rows:
        # Rows have equal norms after the normalization, and not before.
        assert row["gaussian"]["row_spread_after"] == pytest.approx(1, abs=1e-5)
        if row["table"] == "jordan":
            assert row["log-spaced"]["row_spread"] > 1.05
    assert (tmp_path / "polar-8x16-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_trainer_writes_every_figure_and_steps_in_place(tmp_path):
    with unittest.mock.patch.object(jax, "devices", return_value=jax.devices()[:1]):
        trainer.main(
            trainer.Config("gpt-micro", 300, tokens=(64,), rounds=2, starts=False, out=tmp_path)
        )
    (file,) = tmp_path.iterdir()
    row = json.loads(file.read_text())["steps"]["64"]
    assert set(row["tokens_per_second"]) == {"same batch", "read ahead"}
    assert min(row["tokens_per_second"].values()) > 0 and row["loading_ratio"] > 0
    params = 4 * (2 * (12 * 32**2 + 13 * 32) + (300 + 32 + 1) * 32)
    for name in training_step.NAMES:
        assert row[name]["median_s"] > 0 and row[name]["optimizer_share"] < 1
        # Parameters and moments are updated in place: there is no second copy of them.
        assert row[name]["in_place_bytes"] >= row[name]["state_bytes"]
        assert row[name]["state_bytes"] > (3 if name == "adamw" else 2) * params


def test_checkpoints_are_timed_with_checksums_and_without(tmp_path):
    found = checkpoints.main(checkpoints.Config(gigabytes=1e-5, rounds=1, folder=tmp_path))
    assert found.keys() == {"without", "with"}
    assert found["with"].keys() - found["without"].keys() == {"verify_s", "verify_processor_s"}
