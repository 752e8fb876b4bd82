"""`benchmarks.gpu`: all steps at toy size on a CPU, and its budget of time."""

import json

import numpy as np

import optax_muonplus as omp
from benchmarks import gpu, gpu_numbers, parity
from tests.support.trainer import on_devices


def test_all_steps_run_at_toy_size(tmp_path):
    with on_devices(1):
        gpu.main(gpu.Config(toy=True, rounds=1, calls=2, out=tmp_path))
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["command"] == "python -m benchmarks.gpu --toy --rounds 1 --calls 2"
    found = record["steps"]
    assert len(found) == 7
    assert {name: x["failed"] for name, x in found.items() if "failed" in x} == {}
    half, full = (found["polar factors, jordan"][name] for name in gpu.TOYS)
    assert half["device"] == half["cpu"]  # this is the CPU
    assert half["device"].keys() == {"gaussian", "log-spaced", "low rank"}
    assert 1e-4 < half["device"]["gaussian"] < 0.1 and full["device"]["gaussian"] < 1e-5
    apart = found["update against the CPU"]
    assert apart["float32, gram"] < 1e-3 < apart["bfloat16, newton_schulz"] < 0.1
    assert all(distance < 1e-3 for distance in found["update against Optax"].values())
    rows = found["updates of tiny"]["rows"]
    assert rows[gpu.REFERENCE]["of_optax"] == 1 and len(rows) == 1 + len(gpu.TIMED)
    assert all(row["median_s"] > 0 and row["tflop"] > 0 for row in rows.values())
    assert found["step of the trainer"]["muonplus"]["optimizer_share"] < 1


def test_steps_that_fail_or_come_too_late_say_so(tmp_path):
    failed = gpu_numbers.guarded(lambda: 1 / 0)
    assert failed == {"failed": "ZeroDivisionError: ['division by zero']"}
    record = gpu.main(gpu.Config(toy=True, budget_s=-1, out=tmp_path))
    assert all(step == {"failed": "no time was left"} for step in record["steps"].values())


def test_the_float64_polynomial_is_the_iteration():
    x = gpu_numbers.spectra((8, 21))["log-spaced"]
    for table in ("jordan", "polar_express"):
        found = omp.polar.newton_schulz(x.astype(np.float32), omp.polar.Orthogonalize(table, 5))
        assert parity.distance(found, gpu_numbers.polynomial(x, table, 5)) < 1e-5
