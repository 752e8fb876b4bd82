"""Without ``compute_dtype`` products are in bfloat16 on GPUs and TPUs, in float32 on CPUs."""

import re

import jax
import jax.numpy as jnp
import pytest

import optax_muonplus as omp

DOT = re.compile(r"stablehlo\.dot_general.*: \(tensor<[\dx]*(\w+)>, .*-> tensor<[\dx]*(\w+)>")


def lowered(platform, dtype=jnp.float32, shape=(24, 64), **options):
    """The program of an update for another platform."""
    params = {"up": {"kernel": jax.ShapeDtypeStruct(shape, dtype)}}
    tx = omp.muonplus(0.02, **options)
    specs = params, jax.eval_shape(tx.init, params), params
    with jax.default_matmul_precision(None):
        return jax.export.export(jax.jit(tx.update), platforms=[platform])(*specs).mlir_module()


def operands(program):
    return {dtype for dtype, _ in DOT.findall(program)}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_is_the_default_on_accelerators(platform, dtype):
    program = lowered(platform, dtype)
    assert operands(program) == {"bf16"}
    assert operands(lowered(platform, dtype, compute_dtype="float32")) == {"f32"}
    # A momentum in bfloat16 is read as it is stored, as if the dtype had been given.
    alike = [
        lowered(platform, dtype, mu_dtype="bfloat16", **given)
        for given in ({}, {"compute_dtype": "bfloat16"})
    ]
    assert alike[0] == alike[1]


def test_a_momentum_is_read_as_it_is_stored_only_where_products_round_it_to_that():
    for dtype, read in ((None, "bf16"), ("float32", "f32")):
        program = lowered("cuda", mu_dtype="bfloat16", compute_dtype=dtype)
        (types,) = re.findall(r"optimization_barrier .* : (.*) loc", program)
        assert types == f"tensor<1x24x64x{read}>, tensor<1x24x64xf32>"  # and the gradient


def test_a_cpu_multiplies_in_float32():
    assert operands(lowered("cpu")) == {"f32"}
    assert operands(lowered("cpu", jnp.bfloat16)) == {"f32"}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_wider_numbers_and_a_precision_that_was_chosen_are_kept(platform):
    with jax.enable_x64(True):
        assert operands(lowered(platform, jnp.float64)) == {"f64"}
    assert "bf16" not in lowered(platform, jnp.complex64)
    params = {"up": {"kernel": jnp.ones((24, 64))}}
    tx = omp.muonplus(0.02)
    with jax.default_matmul_precision("highest"):
        update = jax.export.export(jax.jit(tx.update), platforms=[platform])
        program = update(params, tx.init(params), params).mlir_module()
    assert operands(program) == {"f32"}


def test_on_a_mesh_the_way_to_the_workers_is_in_bfloat16():
    """Types have no devices: the program of each platform has its own plan."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("a", "b"))
    kernel = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=sharding)
    params = {f"q{i}": {"kernel": kernel} for i in range(8)}
    tx = omp.muonplus(0.02)
    with jax.set_mesh(mesh), jax.default_matmul_precision(None):
        specs = params, jax.eval_shape(tx.init, params), params
        for platform, sent in (("cuda", ["bf16", "f32"]), ("cpu", ["f32", "f32"])):
            update = jax.export.export(jax.jit(tx.update), platforms=[platform])
            program = update(*specs).mlir_module()
            assert re.findall(r"all_to_all.*-> tensor<[\dx]*(\w+)>", program) == sent
