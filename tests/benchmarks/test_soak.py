"""`benchmarks.soak`: how it watches a process, without the trainer."""

import os
import sys

import pytest

from benchmarks import soak

GROWING = """
import json, sys, time
kept = []
with open(sys.argv[1], "w") as metrics:
    for step in range(1, 101):
        kept.append(bytearray(b"x" * 200_000))
        print(json.dumps({"step": step}), file=metrics, flush=True)
        time.sleep(0.01)
"""


def test_soak_finds_a_process_that_grows(tmp_path):
    command = [sys.executable, "-c", GROWING, str(tmp_path / "metrics.jsonl")]
    rows = soak.tenths(soak.watch(command, tmp_path, seconds=0.005), 100)
    assert [row["step"] for row in rows] == list(range(10, 101, 10))
    # 80 steps from the middle of the second tenth to that of the last.
    assert soak.growth_of(rows) == pytest.approx(80 * 200_000, rel=0.2)
    assert soak.growth_of(rows) > soak.LIMIT


def test_soak_refuses_a_run_that_fails_and_tenths_without_samples(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3"):
        soak.watch([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, seconds=0.005)
    with pytest.raises(RuntimeError, match="no sample from step 10 to 20"):
        soak.tenths([{"step": 5, "resident": 1}], 100)
    assert soak.memory_of(os.getpid())["resident"] > 10e6
    assert soak.memory_of(2**30) == {}
