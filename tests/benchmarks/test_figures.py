"""What benchmarks compute beside the clock: work, rounds, records, and what a log says.

The commands themselves are not run: they take minutes, and their figures are read by people.
"""

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import optax_muonplus as omp
from benchmarks import (
    fewest,
    processes,
    products,
    records,
    soak,
    step,
    timing,
    trees,
)
from benchmarks.yardsticks import tiny_shakespeare
from tests.support.documents import ROOT

COMMANDS = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_finds_all_that_it_imports(name):
    importlib.import_module(f"benchmarks.{name}")


def test_the_library_of_another_checkout_can_still_be_imported_after_tracing():
    look = "import sys, benchmarks.tracing; sys.exit('optax_muonplus' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=True)


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


def test_a_round_times_every_program_once_and_its_calls_together(monkeypatch):
    order = []
    clock = iter([0.0, 6.0, 10.0, 19.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.interleaved(programs, 1, calls=3)
    assert order == list("ab" + "aaabbb")  # the first round is not timed
    assert {name: list(values) for name, values in seconds.items()} == {"a": [2.0], "b": [3.0]}


@pytest.mark.parametrize(
    "table, steps, lower", [("jordan", 4, 4.9e-3), ("jordan", 5, 1.42e-3), ("cubic", 5, 6.23e-3)]
)
def test_reach_is_where_the_band_begins(table, steps, lower):
    found = fewest.reach(omp.coefficients.for_steps(table, steps).rows, 1.3 / 0.7)
    assert found == pytest.approx(lower, rel=0.01)


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: tuple[int, ...] = (1, 2)
    learning_rate: float = 0.1
    rivals: bool = True
    bfloat16: bool = False
    library: Path | None = None
    out: Path | None = None


def test_a_record_has_the_command_that_gives_it_and_not_its_folder(tmp_path, monkeypatch):
    assert records.flags(Config(out=Path("somewhere"))) == []
    config = Config((3, 4), 0.5, rivals=False, bfloat16=True, library=Path("other"))
    flags = "--tokens 3 4 --learning-rate 0.5 --no-rivals --bfloat16 --library other"
    assert " ".join(records.flags(config)) == flags
    config = dataclasses.replace(config, out=tmp_path / "new")
    records.write(config.out, "x", records.describe_run("a.b", config))
    record = json.loads((tmp_path / "new" / "x.json").read_text())
    assert record["command"] == f"python -m a.b {flags}"
    assert {"device", "processor", "jax", "optax_muonplus"} <= record["machine"].keys()
    assert record["config"] == {
        "tokens": [3, 4], "learning_rate": 0.5, "rivals": False, "bfloat16": True,
        "library": "other",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path / "new")
    records.write(None, "y", {"a": 1})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]


def test_growth_is_from_the_middle_of_the_second_tenth_to_that_of_the_last():
    samples = [{"step": n, "resident": 50_000_000 + 200_000 * n} for n in range(1, 101)]
    rows = soak.tenths(samples, 100)
    assert [row["step"] for row in rows] == list(range(10, 101, 10))
    assert soak.growth_of(rows) == pytest.approx(80 * 200_000, rel=0.2)
    assert soak.growth_of(rows) > soak.LIMIT
    with pytest.raises(RuntimeError, match="no sample from step 10 to 20"):
        soak.tenths([{"step": 5, "resident": 1}], 100)


def test_the_split_of_tiny_shakespeare_is_nanogpts(tmp_path):
    tiny_shakespeare.write_split("cab" * 10, tmp_path)
    ids = [np.fromfile(tmp_path / f"{split}.bin", "<u2") for split in ("train", "val")]
    np.testing.assert_array_equal(np.concatenate(ids), [2, 0, 1] * 10)
    assert len(ids[1]) == 3


def test_shakespeare_trains_what_its_rows_are_called(tmp_path):
    """Muon has NAdamW beside it, as Optax's; AdamW is plain; RECOMMENDED is the library's."""
    found = {
        name: tiny_shakespeare.run_config(entry, 0.01, tiny_shakespeare.Config(), tmp_path)
        for name, entry in tiny_shakespeare.ENTRIES.items()
    }
    nesterov = {name for name, run in found.items() if run.optimizer.adam_nesterov}
    assert nesterov == {"Muon max", "RECOMMENDED", "Muon+ col_row"}
    entry = tiny_shakespeare.ENTRIES["RECOMMENDED"]
    defaults = inspect.signature(omp.muonplus).parameters
    for name, value in (
        ("norm", entry.norm),
        ("shape_scale", entry.shape),
        ("match_frobenius", entry.frobenius == "matched"),
    ):
        assert value == defaults[name].default


def test_where_nobody_disturbs_a_run_and_it_does_not_end_nothing_else_is_tried(
    tmp_path, monkeypatch
):
    row = {"what": "undisturbed", "problem": "the end did not come; statuses []"}
    monkeypatch.setattr(processes.Trial, "attempt", lambda *arguments: row)
    assert list(processes.Trial(processes.Config(), tmp_path, 0.0).rows()) == [row]
