"""`benchmarks.gpu`: parts that die or hang keep their rows, and all parts run on a CPU."""

import json
import sys

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from benchmarks import gpu, gpu_parts, parity, symmetric_kernel
from benchmarks.compiled import Update
from examples.compiled_programs.forecast import children
from optax_muonplus.run import stacks

MACHINE = {"device": "NVIDIA H100 80GB HBM3"}


@pytest.fixture
def parts_do(monkeypatch):
    """Replaces the processes of parts: each runs `code`, with its name as `part`, and a `say`."""

    def replace(code):
        real = children.process
        head = "import json, os, sys, time\ndef say(**x): print(json.dumps(x), flush=True)\n"

        def process(command, variables, limit_s):
            part = command[command.index("--part") + 1]
            script = f"{head}part = {part!r}\nsay(machine={MACHINE})\n{code}"
            return real([sys.executable, "-c", script], variables, limit_s)

        monkeypatch.setattr(children, "process", process)

    return replace


def test_rows_of_a_part_that_dies_or_hangs_are_kept_and_others_run(
    parts_do, tmp_path, capsys, monkeypatch
):
    parts_do(
        "say(name='first', median_s=0.002)\n"
        "if part == 'gpt-small': time.sleep(100)\n"
        "if part == 'kernel': print('out of memory', file=sys.stderr, flush=True); os.abort()\n"
        "say(name='second', median_s=0.004)\n"
    )
    monkeypatch.setitem(gpu.PARTS, "gpt-small", 2.0)
    config = gpu.Config(parts=("gpt-small", "kernel", "numbers"), out=tmp_path)
    record = gpu.main(config)
    found = [(row["part"], row["name"], row.get("failed")) for row in record["rows"]]
    assert found == [
        ("gpt-small", "first", None),
        ("gpt-small", "", "not done after 2 s"),
        ("kernel", "first", None),
        ("kernel", "", "killed by SIGABRT: out of memory"),
        ("numbers", "first", None),
        ("numbers", "second", None),
    ]
    kept = json.loads((tmp_path / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
    assert kept["rows"] == record["rows"] and kept["machine"] == MACHINE
    assert "killed by SIGABRT" in capsys.readouterr().out


def test_parts_after_the_budget_are_left_out(tmp_path):
    record = gpu.main(gpu.Config(parts=("step", "numbers"), budget_s=0.0, out=tmp_path))
    assert [row["failed"] for row in record["rows"]] == ["no time was left"] * 2
    assert gpu.sentence(record) == "Nothing was measured that README has a sentence for."
    with pytest.raises(SystemExit, match=r"no part stp. Parts are gpt-small"):
        gpu.main(gpu.Config(parts=("stp",)))


def test_the_sentence_for_the_readme_says_what_was_measured():
    row = {"part": "gpt-small", "name": "omp.muonplus, bfloat16", "median_s": 0.00351}
    share = {"part": "step", "name": "muonplus", "optimizer_share": 0.0312}
    record = {"machine": MACHINE, "rows": [row | {"of_reference": 0.417}, share]}
    assert gpu.sentence(record) == (
        "On one NVIDIA H100 80GB HBM3: an update of GPT-Small takes 3.5 ms, 0.42 of Optax's Muon;"
        " the optimizer is 3.1% of a training step of GPT-Small."
    )


@pytest.mark.parametrize(
    ("part", "n"), [("gpt-small", 5), ("kernel", 2), ("step", 5), ("numbers", 22), ("stacks", 5)]
)
def test_parts_run_on_a_cpu(part, n, monkeypatch):
    built = []  # the size of stacks with which each update was compiled
    monkeypatch.setattr(
        gpu_parts, "Update", lambda *args: built.append(stacks.STACK_BYTES) or Update(*args)
    )
    if part == "kernel" and jax.__version_info__ < symmetric_kernel.product.FIRST_JAX:
        pytest.skip("the kernel is written in a newer JAX")
    rows = list(gpu_parts.rows(part, True, 1, 1))
    assert len({row["name"] for row in rows}) == len(rows) == n
    if part == "numbers":
        assert max(row["distance"] for row in rows[:2]) < 1e-4  # Gram's sums have another order
        refused = {row["name"] for row in rows if "refused" in row}
        assert refused == {"polar_express, gram, bfloat16"}
    elif part == "stacks":
        assert built == [2**27, *(mib * 2**20 for mib in (8, 32, 64, 256, 1024))]
        assert stacks.STACK_BYTES == 2**27  # as before
    else:
        assert rows[0]["of_reference"] == 1.0 and all(row.get("median_s", 1) > 0 for row in rows)


@pytest.mark.parametrize("table", ["jordan", "polar_express"])
def test_the_float64_polynomial_is_the_iteration(table):
    x = gpu_parts.spectra((8, 21))["log-spaced"]
    found = omp.polar.polar_factor(x.astype(np.float32), omp.polar.Orthogonalize(table, 5))
    assert parity.distance(found, gpu_parts.polynomial(x, table, 5)) < 1e-5
