"""What benchmarks compute beside the clock: work, rounds, records, tables and differences.

The commands themselves are not run: they take minutes, and their figures are read by people.
"""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import optax_muonplus as omp
from docs import drawings
from examples.trainer.system.errors import UserError
from lab.benchmarks import (
    collectives,
    compiled_table,
    digits,
    meshes,
    polar,
    products,
    records,
    timing,
    tiny_shakespeare,
    trees,
    updates,
)
from lab.sweeps import grid, results
from tests.support.documents import ROOT

EVIDENCE = "docs/explain/evidence.md"
COMMANDS = [path.stem for path in (ROOT / "lab/benchmarks").glob("*.py") if path.stem != "__init__"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_finds_all_that_it_imports(name):
    importlib.import_module(f"lab.benchmarks.{name}")


def test_work_counts_the_operations_of_plain_and_gram_newton_schulz():
    """Per layer of width d: 30 d^3 for each square, 50 d^3 for each 1:4 under Gram, else 90 d^3."""
    size = trees.SIZES["gpt-384"]._replace(layers=2)
    for polar_method, cube in (("auto", 4 * 30 + 2 * 50), ("newton_schulz", 4 * 30 + 2 * 90)):
        found = products.operations(size, polar_method, None)
        assert found == 2 * cube * 384**3


def test_a_round_times_every_program_once_and_its_calls_together(monkeypatch):
    order = []
    clock = iter([0.0, 6.0, 10.0, 19.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.interleaved(programs, 1, calls=3)
    assert order == list("ab" + "aaabbb")  # the first round is not timed
    assert {name: list(values) for name, values in seconds.items()} == {"a": [2.0], "b": [3.0]}


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: tuple[int, ...] = (1, 2)
    learning_rate: float = 0.1
    rivals: bool = True
    library: Path | None = None
    out: Path | None = None


def test_a_record_has_the_command_that_gives_it_and_not_its_folder(tmp_path):
    assert records.flags(Config(out=Path("somewhere"))) == []
    config = Config((3, 4), 0.5, rivals=False, library=Path("other"), out=tmp_path / "new")
    records.write(config.out, "x", records.describe_run("a.b", config))
    record = json.loads((tmp_path / "new" / "x.json").read_text())
    flags = "--tokens 3 4 --learning-rate 0.5 --no-rivals --library other"
    assert record["command"] == f"python -m a.b {flags}"
    assert {"commit", "device", "processor", "jax", "optax_muonplus"} <= record["machine"].keys()
    assert record["config"] == {
        "tokens": [3, 4], "learning_rate": 0.5, "rivals": False, "library": "other",
    }  # fmt: skip
    records.write(None, "y", {"a": 1})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]


def test_the_spectra_of_polar_factors_are_those_of_the_exact_ones():
    found = polar.spectra(polar.Config(short=4, long=6, count=1))
    for x, exact in found.values():
        np.testing.assert_allclose(exact @ exact.swapaxes(-1, -2), np.eye(4)[None], atol=1e-12)
        np.testing.assert_allclose(polar.polar.svd(x), exact, atol=1e-3)


def test_the_split_of_tiny_shakespeare_is_nanogpts(tmp_path):
    tiny_shakespeare.write_split("cab" * 10, tmp_path)
    ids = [np.fromfile(tmp_path / f"{split}.bin", "<u2") for split in ("train", "val")]
    np.testing.assert_array_equal(np.concatenate(ids), [2, 0, 1] * 10)
    assert len(ids[1]) == 3


def test_a_row_of_shakespeare_has_the_runs_of_its_ledger(tmp_path):
    """The optimizer of each, as the committed ledger has it, and the default's form."""
    default = inspect.signature(omp.muonplus).parameters
    ledgers = ROOT / "lab/results/benchmarks/yardsticks/tiny-shakespeare"
    for name, folder in {
        "AdamW as published": "adamw-as-published", "AdamW": "adamw-0.004",
        "Muon": "muon-max-0.008", "Muon+": "recommended-0.008",
        "Muon+ col_row": "muonplus-col_row-0.008",
    }.items():  # fmt: skip
        asked = tiny_shakespeare.sweep_of(name, tiny_shakespeare.Config(), tmp_path)
        sweep = results.read(ledgers / folder)
        (method,) = grid.methods(asked.grid)
        assert method in sweep.methods(), name
        (rate,) = grid.rates(asked.grid, method)
        assert rate == sweep.best_rate(method), name
        kept = json.loads((ledgers / folder / "sweep.json").read_text())["base"]["optimizer"]
        rule = asked.config.optimizer
        for field in ("adam_learning_rate", "weight_decay", "adam_b2", "hold_share", "schedule"):
            assert getattr(rule, field) == kept[field], (name, field)
        if name == "Muon+":
            assert method.norm == default["norm"].default and method.frobenius == "matched"
            assert rule.shape_scale == default["shape_scale"].default == kept["shape_scale"]
    assert default["match_frobenius"].default


def test_wrong_options_end_before_anything_is_measured(monkeypatch):
    with pytest.raises(SystemExit, match="A mesh is written as data=4,model=2, not as 'data'"):
        meshes.simulated("data")
    with pytest.raises(UserError, match="--only AdaMuon: give one of 'AdamW as published'"):
        tiny_shakespeare.main(tiny_shakespeare.Config(only=("AdaMuon",)))
    one = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    monkeypatch.setattr(meshes, "simulated", lambda text: one)
    with pytest.raises(SystemExit, match="is one device, on which nothing moves"):
        collectives.main(collectives.Config(spec="data,-"))


# The bits of two versions

NAME = "muon | none | jit | update 0"
ARRAY = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
ARRAYS = {NAME: ARRAY, "muon | none | jit | state": np.array(0.0)}
ONE_BIT = ARRAY.copy()
ONE_BIT.view(np.uint32)[1, 2] ^= 1
BY = "muon | none | jit: 1 arrays differ, by up to 1.2e-07\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (ARRAYS, "0 arrays differ, 0 are unmatched\n"),
        ({**ARRAYS, NAME: ONE_BIT}, BY + "1 arrays differ, 0 are unmatched\n"),
        ({**ARRAYS, "muon | none | jit | state": np.array(-0.0)}, "1 arrays differ, 0 are unm"),
        ({NAME: ARRAY}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, "one more": np.array(1)}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, NAME: ARRAY.T}, "0 arrays differ, 1 are unmatched\n"),
        ({**ARRAYS, NAME: ARRAY.astype(np.float64)}, "0 arrays differ, 1 are unmatched\n"),
    ],
    ids=["equal", "one bit", "minus zero", "missing", "additional", "shape", "dtype"],
)
def test_compare_says_what_differs(tmp_path, capsys, changed, said):
    for file, arrays in (("old.npz", ARRAYS), ("new.npz", changed)):
        np.savez(tmp_path / file, **arrays)
    files = [str(tmp_path / file) for file in ("old.npz", "new.npz")]
    assert updates.main(["compare", *files]) == (changed is not ARRAYS)
    assert said in capsys.readouterr().out


def test_the_digits_have_a_loss_for_each_seed_and_second_rate(monkeypatch, tmp_path):
    images = np.random.default_rng(0).random((8, 8, 8, 1), np.float32), np.arange(8) % 10
    monkeypatch.setattr(digits, "read_images", lambda: (images, images))
    config = digits.Config(
        methods=("omp.muonplus", "optax.adamw"), rates=(0.02,), second_rates=(0.0, 0.003),
        seeds=(0, 1), steps=10, batch_size=4, out=tmp_path,
    )  # fmt: skip
    digits.main(config)
    rows = json.loads((tmp_path / f"digits-mlp-{jax.default_backend()}.json").read_text())["rows"]
    assert [(row["method"], row["second"]) for row in rows] == [
        ("omp.muonplus", 0.0), ("omp.muonplus", 0.003), ("optax.adamw", 0.0)
    ]  # fmt: skip
    losses = np.array([row["losses"] for row in rows])
    assert losses.shape == (3, 2) and len(np.unique(losses)) == 6 and np.all(losses < 10)


def test_the_page_has_the_table_of_the_compiled_programs():
    page = compiled_table.PAGE.read_text()
    assert compiled_table.with_table(page) == page
    found = list(compiled_table.rows())
    assert {row["name"] for row in found} >= {"optax.contrib.muon", "omp.muonplus, sharding="}
    stale = page.replace("1466", "1467")
    assert stale != page and compiled_table.with_table(stale) == page


def test_the_pictures_have_the_numbers_of_the_pages():
    readme, evidence = ((ROOT / name).read_text() for name in ("README.md", EVIDENCE))
    for _, optax, ours, unit in drawings.COSTS:
        for number in (optax, ours):
            assert f"{number:,g} {unit}".strip() in readme
    for name, tokens, mean, half in drawings.CELLS:
        sign = "+" if mean > 0 else "\N{MINUS SIGN}"
        written = f"{sign}{abs(mean):.4f} ± {half:.4f}"
        lines = [line for line in evidence.splitlines() if line.startswith("|")]
        (line,) = [line for line in lines if written in line]
        assert tokens in (None, 20) or f"| {tokens:g} |" in line, name
