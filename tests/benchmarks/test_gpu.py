"""`benchmarks.gpu`: all parts at toy size on a CPU, its time budget, and what it records."""

import json
import math

import jax
import numpy as np
import pytest
from rich.console import Console

import optax_muonplus as omp
from benchmarks import parity, trees
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import correctness, kernels, parts, steps, text, training, updates, variants
from benchmarks.gpu.settings import TOY, Settings
from examples.trainer.settings.model import ModelConfig
from tests.support.trainer import on_devices

QUIET = Console(quiet=True)


def run(tmp_path, part):
    """The steps of a part, as its file has them."""
    with on_devices(1):
        command.main(["--part", str(part), "--toy", "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["command"] == f"python -m benchmarks.gpu --part {part} --toy"
    assert {"device", "jax", "optax_muonplus"} <= record["machine"].keys()
    assert {name: x["failed"] for name, x in record["steps"].items() if "failed" in x} == {}
    return record["steps"]


def assert_timed(rows, *names):
    for name in names:
        assert rows[name]["median_s"] > 0 and rows[name]["tflop_per_s"] > 0, rows[name]


def test_part_1_checks_numbers_and_times_updates(tmp_path):
    found = run(tmp_path, 1)
    assert found["copy"]["tb_per_s"] > 0 and found["square products"]["X3"]["tflop_per_s"] > 0
    jordan = found["distance to float64, jordan"]
    for spectrum in ("gaussian", "log-spaced", "low rank"):
        assert jordan["float32, newton_schulz"][spectrum] < 1e-5
        assert 1e-5 < jordan["float16, newton_schulz"][spectrum] < 1e-2
        # This is the CPU.
        half = jordan["bfloat16, newton_schulz"]
        assert half[spectrum] == pytest.approx(half["on the CPU"][spectrum]) and half[spectrum] > 0
    assert "diverges" in found["distance to float64, cans"]["bfloat16, newton_schulz"]["failed"]
    apart = found["distance to Optax"]
    assert 0 < apart["newton_schulz"] < 1e-4 and apart["gram"] < 1e-3
    assert found["products of tiny, bfloat16"]["16x16x16"]["tflop_per_s"] > 0
    for form in ("", ", scanned"):
        rows = found[f"updates of tiny{form}"]
        assert_timed(rows, variants.REFERENCE, variants.OURS)
        assert rows[variants.REFERENCE]["of_optax"] == 1
    assert found["text"]["exit_status"] == 0


def test_part_2_varies_what_is_left_open(tmp_path):
    found = run(tmp_path, 2)
    assert_timed(found["stacks of 0.00195312 MiB"], variants.OURS)
    assert_timed(found["sweep of float32"], variants.OURS, "omp.muonplus:X3")
    assert found["mesh of one device"]["mesh"]["median_s"] > 0
    assert found[f"kernels, {variants.OURS}"]["launches"] > 0
    step = found["step of the trainer"]["muonplus"]
    assert step["tokens_per_s"] > 0 and step["optimizer_share"] < 1
    assert "does not tell its memory" in found[f"peak memory, {variants.OURS}"]["skipped"]


def test_part_3_trains_at_all_rates_and_with_seeds_at_the_best(tmp_path):
    found = run(tmp_path, 3)
    runs = [(x["rule"], x["learning_rate"], x["seed"]) for x in found.values() if "rule" in x]
    best = {rule: found["summary"][rule]["learning_rate"] for rule in training.RULES}
    at_rates = [(rule, rate, 0) for rule in training.RULES for rate in TOY.rates]
    assert sorted(runs) == sorted(at_rates + [(rule, rate, 1) for rule, rate in best.items()])
    for rule, summary in found["summary"].items():
        if rule in training.RULES:
            assert summary["seeds"] == 2 and summary["standard_error"] > 0
            assert abs(summary["val_loss"] - math.log(300)) < 1
    assert len(found["muon, rate 0.01, seed 0"]["train_loss"]) == TOY.train_steps


def test_steps_that_fail_or_no_longer_fit_do_not_stop_the_others():
    now, done, saved = [0.0], {}, []

    def takes(seconds, error=None):
        def run():
            now[0] += seconds
            if error:
                raise error
            return {"x": seconds}

        return run

    def planned():
        yield steps.Step("a", 10, takes(10))
        yield steps.Step("b", 10, takes(50, MemoryError("out of memory\nmuch detail")))
        yield steps.Step("c", 60, takes(60))
        yield steps.Step("d", 5, takes(5, steps.Unavailable("no such device")))
        if "failed" in done["b"]:
            yield steps.Step("e", 5, takes(5))

    steps.run_all(planned(), done, 100, lambda: saved.append(dict(done)), QUIET, lambda: now[0])
    assert done["a"] == {"x": 10, "wall_s": 10}
    assert done["b"]["failed"] == "MemoryError: out of memory"
    assert done["b"]["at"].startswith("test_gpu.py:")
    assert done["c"]["skipped"] == "takes some 60 s, and 40 of 100 s are left"
    assert done["d"]["skipped"] == "no such device"
    assert done["e"]["x"] == 5
    assert [list(x) for x in saved] == [list("abcde")[:n] for n in range(1, 6)]


def test_every_variant_makes_its_optimizer():
    tree = trees.random_like(trees.shapes(trees.Size(16, 1, 40, gated=True)))
    for name, variant in variants.VARIANTS.items():
        try:
            variants.optimizer(variant, tree).init(tree)
        except steps.Unavailable as error:
            assert "kernel" in name and "symmetric_kernel" in str(error)
    named = {*Settings().compared, *(name for _, names in Settings().sweeps for name in names)}
    assert named <= variants.VARIANTS.keys()


def test_an_update_feeds_its_state_back():
    size = trees.Size(16, 1, 40, gated=False)
    params, grads = updates.random_trees(size)
    update, _ = updates.compile_update(variants.VARIANTS[variants.OURS], params, grads)
    update()
    second = update()
    tx = variants.optimizer(variants.VARIANTS[variants.OURS], params)
    again = jax.jit(tx.update)
    _, state = again(grads, tx.init(params), params)
    expected, _ = again(grads, state, params)
    for found, wanted in zip(jax.tree.leaves(second), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=2e-3
        )


def test_the_float64_polynomial_is_the_iteration():
    x = correctness.spectra((8, 21))["log-spaced"]
    for table in ("jordan", "polar_express"):
        found = omp.polar.newton_schulz(x.x.astype(np.float32), table, 5)
        assert parity.distance(found, correctness.polynomial(x, table, 5)) < 1e-5


def test_kernels_are_summed_by_kind_for_one_call():
    times = [("nvjet_hsh_128x256", 3.0), ("nvjet_hsh_128x256", 1.0), ("loop_transpose_fusion", 2.0)]
    found = kernels.summary(times, calls=2)
    assert found["seconds"] == 3 and found["launches"] == 1.5
    assert found["seconds_by_kind"] == {"products": 2, "copies": 1}
    assert found["longest"][0] == {"kernel": "nvjet_hsh_128x256", "seconds": 2, "launches": 1}


def test_operations_of_a_step_count_products_and_attention():
    model = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8)
    with on_devices(1):
        found = training.operations_of_step(model, 300, 40)
    assert found == 40 * (6 * (2 * 12 * 16**2 + 300 * 16) + 12 * 2 * 16 * 8)


def test_text_has_each_source_once(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_bytes(b"\xff")
    (tmp_path / "d.py").write_text("y = 2\n")
    (tmp_path / "e.txt").write_text("z")
    lines = [json.loads(line)["text"] for line in text.collect(tmp_path, 1000).splitlines()]
    assert lines == ["x = 1\n", "y = 2\n"]
    assert len(text.collect(tmp_path, 6).splitlines()) == 1


def test_each_part_plans_its_steps_for_a_gpu(monkeypatch):
    """With the sizes of a GPU; nothing runs but the plan."""
    monkeypatch.setattr(text, "start", lambda toy: type("P", (), {"kill": int, "wait": int}))
    monkeypatch.setattr(correctness, "spectra", lambda shape: {})
    for part, plan in parts.PARTS.items():
        names = [step.name for step in plan(Settings(), {}, QUIET)]
        assert len(set(names)) == len(names) > 8, part
