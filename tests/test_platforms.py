"""The switch that runs the core's tests on an accelerator; none is needed here."""

import os
import subprocess
import sys
import types

import pytest

from tests.support import platforms
from tests.support.documents import ROOT


def test_every_folder_that_stays_on_a_cpu_is_there():
    assert all((ROOT / "tests" / folder).is_dir() for folder in platforms.FOLDERS)


@pytest.fixture(scope="module")
def collected():
    """A process that would test on a GPU: what JAX is told, and what pytest does in two folders."""
    report = (
        "import pytest, sys; code = pytest.main(sys.argv[1:]); import jax;"
        "print(jax.config.jax_platforms, jax.config.jax_default_matmul_precision, int(code))"
    )
    counts = "test_auto_counts_operations_and_asks_for_float32_products"
    chosen = [
        "tests/execution/mesh/test_plan.py",
        f"tests/execution/polar/test_operations.py::{counts}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", report, "-p", "no:cacheprovider", "-q", *chosen],
        env=os.environ | {platforms.VARIABLE: "cuda"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return types.SimpleNamespace(lines=done.stdout.splitlines(), errors=done.stderr)


def test_the_switch_sets_platform_and_precision_and_skips(collected):
    assert collected.lines[-1] == "cuda,cpu highest 0", collected
    skipped = [line for line in collected.lines if line.startswith("SKIPPED")]
    why = platforms.FOLDERS["execution/mesh"]
    assert any("tests/execution/mesh" in line and why in line for line in skipped)
    assert any(platforms.MARKS["cpu_program"] in line for line in skipped)
    assert "passed" not in "".join(collected.lines)
