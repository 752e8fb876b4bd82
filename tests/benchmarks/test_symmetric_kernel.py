"""The kernel for symmetric products, run by JAX's interpreter, which looks for races.

It finds a missing wait or fence of the stores. It does not find a missing ``wgmma_wait``: products
of the tensor cores end at once in it. And it is no GPU: there `benchmarks.gpu` compares results.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.symmetric_kernel import Tiling

mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
if not hasattr(mosaic_gpu, "InterpretGPUParams"):
    pytest.skip("this JAX has no public interpreter of GPU kernels", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # noqa: E402

from benchmarks.symmetric_kernel import kernel  # noqa: E402

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Blocks of 64 in place of 256, so that the interpreter takes seconds. Two slots for three steps.
SMALL = Tiling(rows=16, depth=32, steps=2)


def run(*operands, cluster):
    """The kernel's result in float64, from memory that is full of NaN, and whether it raced."""
    result = kernel.run(
        *(jnp.asarray(x) for x in operands),
        tiling=SMALL._replace(cluster=cluster),
        multiprocessors=2,  # so that each works on several blocks in turn
        interpret=mosaic_gpu.InterpretGPUParams(detect_races=True),
    )
    result = np.asarray(result.astype(jnp.float32), np.float64)
    return result, interpret_pallas_call.get_races().races_found


def gaussian(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def assert_rounded_once(result, exact, terms, dtype):
    """Half a unit in the last place, and what sums in float32 of such ``terms`` may lose."""
    unit = jnp.finfo(dtype).eps
    error = np.abs(result - exact)
    assert np.all(error <= unit / 2 * np.abs(exact) + 2**-22 * terms)


def mirrored(x):
    return np.tril(x) + np.swapaxes(np.tril(x, -1), -1, -2)


def test_a_gram_matrix_without_clusters(dtype="bfloat16"):
    x = gaussian(1, 128, 96).astype(DTYPES[dtype])
    result, raced = run(x, x, cluster=1)
    wide = x.astype(np.float64)
    exact = wide @ np.swapaxes(wide, -1, -2)
    terms = np.abs(wide) @ np.swapaxes(np.abs(wide), -1, -2)
    assert_rounded_once(result, exact, terms, dtype)
    assert np.array_equal(result, np.swapaxes(result, -1, -2))
    assert not raced


def test_a_combination_with_a_product_that_commutes(dtype="float16"):
    """Each matrix of a stack has its own coefficients; clusters have two thread blocks."""
    x = gaussian(2, 128, 128) / 11
    r = (x @ np.swapaxes(x, -1, -2)).astype(DTYPES[dtype])
    p = (r.astype(np.float64) @ r.astype(np.float64)).astype(DTYPES[dtype])
    coefficients = np.array([[2.0, -1.5, 0.5], [-1.0, 3.0, 4.0]], np.float32)
    result, raced = run(r, p, r, coefficients, cluster=2)
    alpha, beta, gamma = np.moveaxis(coefficients.astype(np.float64), -1, 0)[..., None, None]
    r, p = r.astype(np.float64), p.astype(np.float64)
    exact = mirrored(alpha * (r @ p) + beta * r + gamma * np.eye(128))
    terms = np.abs(alpha) * (np.abs(r) @ np.abs(p)) + np.abs(beta * r) + np.abs(gamma)
    assert_rounded_once(result, exact, np.maximum(terms, np.swapaxes(terms, -1, -2)), dtype)
    assert np.array_equal(result, np.swapaxes(result, -1, -2))
    assert not raced


@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
def test_each_block_of_the_triangle_is_computed_once(blocks):
    tiles = np.arange(blocks * (blocks + 1) // 2)
    rows, columns = kernel.fold(tiles, blocks)
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (i, j) for i in range(blocks) for j in range(i + 1)
    ]
