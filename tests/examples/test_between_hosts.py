"""Several hosts: the flag of XLA for them, and gradients that replicas add in bfloat16."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples.train import main
from examples.trainer.models.layers import Layout, look_up, product
from examples.trainer.training import sharding
from tests.support.trainer import ADAMW_RULE, TOY, assemble_toy, first_losses

MESH = "data=2,fsdp=4"
PIPELINED = "--xla_gpu_enable_pipelined_all_reduce"


@pytest.mark.parametrize(
    "mesh", ["", "fsdp=8", "data=8", "data=2,fsdp=4", "fsdp=64", "data=1,tensor=16"]
)
def test_one_device_one_host_and_no_replicas_need_no_flag(mesh):
    environment = {}
    sharding.set_xla_flags(mesh, environment)
    assert environment == {}


def test_what_the_user_sets_comes_last_and_wins():
    environment = {"XLA_FLAGS": f"{PIPELINED}=false"}
    sharding.set_xla_flags("data=8,fsdp=8", environment)
    assert environment["XLA_FLAGS"] == f"{PIPELINED}=true {PIPELINED}=false"


def test_a_run_sets_the_flag_before_it_begins(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    words = ["--data.paths", str(tmp_path / "none.txt"), "--mesh", "data=4,fsdp=4"]
    assert main([*TOY, *words]) == 2
    assert os.environ["XLA_FLAGS"] == f"{PIPELINED}=true --xla_cpu_max_isa=AVX"


def test_this_version_of_jax_accepts_the_flag():
    """It ends a process that gives an unknown one."""
    code = "import jax; jax.devices()"
    environment = {**os.environ, "XLA_FLAGS": sharding.xla_flags({"data": 8, "fsdp": 8})}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def of_rounded_replicas(gradient):
    """What replicas of 4 rows each give: their sums, rounded, then added and rounded."""
    halves = [gradient(slice(0, 4)), gradient(slice(4, 8))]
    first, second = (half.astype(ml_dtypes.bfloat16).astype(np.float64) for half in halves)
    return (first + second).astype(ml_dtypes.bfloat16).astype(np.float64)


def whole_numbers(*shape):
    """So that sums within a replica are exact, and most are no bfloat16."""
    return np.random.default_rng(0).integers(-40, 40, shape).astype(np.float64)


def test_replicas_round_once_what_their_devices_have_added():
    layout = Layout(sharding.make_mesh(MESH, jax.devices()), "bfloat16")
    x, dy = whole_numbers(8, 3, 16), whole_numbers(8, 3, 24)[..., ::-1]
    kernel = jnp.zeros((16, 24))

    def found(layout):
        def weighted(kernel):
            return jnp.sum(product(jnp.float32(x), kernel, ("embed", "mlp"), layout) * dy)

        return np.asarray(jax.jit(jax.grad(weighted))(kernel), np.float64)

    expected = of_rounded_replicas(lambda rows: np.einsum("bti,bto->io", x[rows], dy[rows]))
    np.testing.assert_array_equal(found(layout), expected)
    exact = np.einsum("bti,bto->io", x, dy)
    assert (expected != exact).mean() > 0.5
    alone = sharding.make_mesh("fsdp=8", jax.devices())
    for other in (Layout(layout.mesh), Layout(alone, "bfloat16")):  # nothing to round
        np.testing.assert_array_equal(found(other), exact)


def test_gradients_of_an_embedding_are_added_likewise():
    layout = Layout(sharding.make_mesh("data=2,fsdp=2,tensor=2", jax.devices()), "bfloat16")
    ids = np.random.default_rng(1).integers(0, 6, (8, 30))
    dy = whole_numbers(8, 30, 16)

    def weighted(table):
        return jnp.sum(look_up(table, jnp.asarray(ids), jnp.float32, layout) * dy)

    def gradient(rows):
        summed = np.zeros((6, 16))
        np.add.at(summed, ids[rows], dy[rows])
        return summed

    found = jax.jit(jax.grad(weighted))(jnp.zeros((6, 16)))
    np.testing.assert_array_equal(np.asarray(found, np.float64), of_rounded_replicas(gradient))


@pytest.mark.parametrize("mesh", [MESH, "data=2,fsdp=2,tensor=2"])
def test_losses_are_those_of_float32_sums_to_bfloat16_rounding(text, mesh):
    plain, rounded = (
        assemble_toy(text, mesh, optimizer=ADAMW_RULE, replica_sum_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    first, second = first_losses(plain), first_losses(rounded)
    # 8 bits of mantissa change a gradient by 0.4% at most, and a step changes a loss by 0.05.
    assert first == pytest.approx(second, abs=5e-4) and first != second
