"""`lab.benchmarks.gpu`: parts that die or hang keep their rows, and all parts run on a CPU."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.benchmarks import gpu, gpu_rows
from lab.benchmarks.gpu_rows import Event
from lab.compiled_programs import child

OTHERS = ["hopper_polar", "auto"]
MACHINE = {"device": "NVIDIA H100 80GB HBM3"}


@pytest.fixture
def parts_do(monkeypatch):
    """Replaces the processes of parts: each runs `code`, with its name as `part`, and a `say`."""

    def replace(code):
        real = child.process
        head = "import json, os, sys, time\ndef say(**x): print(json.dumps(x), flush=True)\n"

        def process(command, variables, limit_s):
            part = command[command.index("--part") + 1]
            script = f"{head}part = {part!r}\nsay(machine={MACHINE})\n{code}"
            return real([sys.executable, "-c", script], variables, limit_s)

        monkeypatch.setattr(child, "process", process)

    return replace


def test_rows_of_a_part_that_dies_or_hangs_are_kept_and_others_run(
    parts_do, tmp_path, capsys, monkeypatch
):
    parts_do(
        "say(name='first', median_s=0.002)\n"
        "if part == 'gpt-small': time.sleep(100)\n"
        "if part == 'float32': print('out of memory', file=sys.stderr, flush=True); os.abort()\n"
        "say(name='second', median_s=0.004)\n"
    )
    monkeypatch.setitem(gpu.PARTS, "gpt-small", 1.0)  # and a second that the others do not need
    parts = ("gpt-small", "float32", "llama-1b")
    budget_s = 2.0 + sum(gpu.PARTS[part] for part in parts[1:])
    config = gpu.Config(parts=parts, budget_s=budget_s, out=tmp_path)
    record = gpu.main(config)
    found = [(row["part"], row["name"], row.get("failed")) for row in record["rows"]]
    assert found == [
        ("gpt-small", "first", None),
        ("gpt-small", "", "not done after 2 s"),
        ("float32", "first", None),
        ("float32", "", "killed by SIGABRT: out of memory"),
        ("llama-1b", "first", None),
        ("llama-1b", "second", None),
    ]
    kept = json.loads((tmp_path / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
    assert kept["rows"] == record["rows"] and kept["machine"] == MACHINE
    assert "killed by SIGABRT" in capsys.readouterr().out


def test_parts_after_the_budget_are_left_out(tmp_path):
    record = gpu.main(gpu.Config(parts=("float32", "llama-1b"), budget_s=0.0, out=tmp_path))
    assert [row["failed"] for row in record["rows"]] == ["no time was left"] * 2
    with pytest.raises(SystemExit, match=r"no part stp. Parts are kernel"):
        gpu.main(gpu.Config(parts=("stp",)))
    assert sum(gpu.PARTS[part] for part in gpu.Config.parts) <= gpu.Config.budget_s == 235


@pytest.mark.parametrize("part", ["gpt-small", "float32"])
def test_updates_are_timed_on_a_cpu(part, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # torch comes last
    rows = list(gpu_rows.rows(part, True, 1, 2))
    assert len({row["name"] for row in rows}) == len(rows) == 3
    assert rows[1]["name"] == "omp.muonplus"  # as typed
    assert rows[0]["of_reference"] == 1.0 and all(row["median_s"] > 0 for row in rows)


def test_the_kernel_is_compared_with_the_plain_iteration():
    rows = list(gpu_rows.rows("kernel", True, 1, 2))
    assert [row["name"].split(",")[0] for row in rows] == 2 * ["plain iteration", *OTHERS]
    assert [row["of_reference"] for row in rows[::3]] == [1.0, 1.0]
    for row in rows[1:3] + rows[4:]:
        assert row["mosaic_calls"] == 0  # a CPU has the plain path
        assert row["distance"] < 0.05  # as far as the plain and the Gram form in bfloat16 are apart


def test_training_steps_are_timed_and_train():
    seconds = {}

    def timed(programs):
        for name, program in programs.items():
            before = jax.tree.map(jnp.copy, program.state.params)
            after = program()
            moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
            assert all(jax.tree.leaves(moved)), name
            seconds[name] = np.array([0.5])
        return seconds

    rows = list(gpu_rows.training_steps(True, timed))
    assert [row["name"] for row in rows] == ["optax.adamw", "optax.contrib.muon", "omp.muonplus"]
    assert {row["tokens_per_s"] for row in rows} == {16 * 32 / 0.5}


def test_time_is_divided_into_products_traffic_and_waiting():
    names = ("nvjet_hsh_128x256", "loop_convert_fusion", "gemm_fusion_dot_3", "input_reduce_fusion")
    starts, durations = (0, 10, 40, 60), (10, 20, 30, 10)  # the last two overlap by ten
    events = [Event(*x) for x in zip(names, starts, durations, strict=True)]
    found = gpu_rows.classes(reversed(events), 2)
    assert found == pytest.approx(
        {"products_s": 20e-9, "traffic_s": 15e-9, "waiting_s": 5e-9, "kernels": 2}
    )


def test_a_profile_without_a_gpu_is_read_and_has_no_kernels():
    assert gpu_rows.profile(jax.jit(lambda: jnp.ones((8, 8)) @ jnp.ones((8, 8)))) == {}
