"""Numbers against float64, against Optax, and of the symmetric kernel against itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from benchmarks import parity, trees
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Figures, guarded
from benchmarks.gpu.variants import KERNEL_ON, PRECISIONS, check_kernel, products_in

# Options of ``optax_muonplus.polar.polar_function``, and the precision of float32 products.
METHODS: dict[str, tuple[dict[str, Any], str | None]] = {
    **{
        f"{dtype}, {polar}": ({"compute_dtype": dtype, "polar": polar}, None)
        for dtype, polar in (
            ("bfloat16", "newton_schulz"), ("bfloat16", "auto"),
            ("float16", "newton_schulz"), ("float16", "gram")
        )
    },
    **{
        f"{name}, {polar}": ({"polar": polar}, precision)
        for name, precision in PRECISIONS.items()
        for polar in ("newton_schulz", "gram")
    },
}  # fmt: skip


class Matrix(NamedTuple):
    """A matrix in float64 that float32 holds exactly, and its singular value decomposition."""

    x: np.ndarray
    u: np.ndarray
    s: np.ndarray
    vh: np.ndarray


def spectra(shape: tuple[int, int]) -> dict[str, Matrix]:
    """A Gaussian matrix, one with singular values log-spaced to 1e-3, and one of low rank."""
    random = np.random.default_rng(0)
    x = random.standard_normal(shape)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    found = {
        "gaussian": x,
        "log-spaced": (u * np.logspace(0, -3, len(s))) @ vh,
        "low rank": (u * (np.arange(len(s)) < max(1, len(s) // 100))) @ vh,
    }
    exact = {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}
    return {name: Matrix(x, *np.linalg.svd(x, full_matrices=False)) for name, x in exact.items()}


def polynomial(matrix: Matrix, table: str, steps: int) -> np.ndarray:
    """The iteration's polynomial of each singular value, in float64."""
    rows, _, safety_factor, *_ = omp.coefficients.resolve(table, steps)
    scaled = matrix.s / (safety_factor * np.linalg.norm(matrix.s))
    return (matrix.u * omp.coefficients.evaluate(rows, scaled)) @ matrix.vh


def distances(found: Any, exact: dict[str, np.ndarray]) -> dict[str, float]:
    """Of each matrix of a stack to the exact one, relative, in the Frobenius norm."""
    return {name: parity.distance(y, z) for y, (name, z) in zip(found, exact.items(), strict=True)}


def of_table(table: str, steps: int, matrices: dict[str, Matrix]) -> Figures:
    """Distances of all methods to the float64 polynomial of a table.

    In half precision also with products rounded exactly once on the CPU, which the device's
    products should be as near as.
    """
    exact = {name: polynomial(x, table, steps) for name, x in matrices.items()}
    stack = np.stack([matrix.x for matrix in matrices.values()]).astype(np.float32)
    cpu = _cpu()

    def measured(options: dict[str, Any], precision: str | None) -> Figures:
        function = omp.polar.polar_function(ns_coeffs=table, ns_steps=steps, **options)
        with products_in(precision):
            on_device = distances(jax.jit(function)(jnp.asarray(stack)), exact)
        if "compute_dtype" not in options or cpu is None:
            return on_device
        with jax.default_device(cpu):
            on_cpu = distances(jax.jit(function)(jnp.asarray(stack)), exact)
        return on_device | {"on the CPU": on_cpu}

    return {name: guarded(lambda given=given: measured(*given)) for name, given in METHODS.items()}


def _cpu() -> jax.Device | None:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


def as_optax(settings: Settings) -> Figures:
    """The largest distance of an update to Optax's, relative to a matrix, in float32 products."""
    tree = trees.shapes(settings.parity)
    params, grads = trees.random_like(tree, 0), trees.random_like(tree, 1)
    dims = omp.muon_dimension_numbers(tree)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": dims}

    def update(tx: optax.GradientTransformation) -> Any:
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)

    with products_in("highest"):
        theirs = update(optax.contrib.muon(0.01, **given))
        labels = omp.partition_labels(tree)
        return {
            polar: parity.largest_difference(
                update(omp.muon(0.01, polar=polar, **parity.AS_OPTAX, **given)), theirs, labels
            )
            for polar in ("newton_schulz", "gram")
        }


def kernel(settings: Settings, dtype: str) -> Figures:
    """Polar factors by the symmetric kernel, many times, in memory that held NaN.

    A result must not depend on what was in its memory. If two results differ in any bit, there is
    a race.
    """
    check_kernel()
    options: dict[str, Any] = {"compute_dtype": dtype, "polar": "newton_schulz"}
    plain, with_kernel = omp.orthogonalize(**options), omp.orthogonalize(**options, **KERNEL_ON)

    def measured(n: int) -> Figures:
        stack = jax.random.normal(jax.random.key(n), (4, n, 2 * n))
        tree = {f"matrix_{i}": {"kernel": x} for i, x in enumerate(stack)}
        expected = _stacked(jax.jit(plain.update)(tree, plain.init(tree))[0])
        update, state = jax.jit(with_kernel.update), with_kernel.init(tree)
        found = []
        for _ in range(settings.races):
            _poison(8 * stack.nbytes)
            found.append(_stacked(update(tree, state)[0]))
        return {
            "runs": len(found),
            "different_results": len({x.tobytes() for x in found}),
            "not_finite": int(sum((~np.isfinite(x)).sum() for x in found)),
            "distance_to_plain": max(parity.distance(x, expected) for x in found),
        }

    return {str(n): guarded(lambda n=n: measured(n)) for n in settings.symmetric}


def _stacked(tree: Any) -> np.ndarray:
    return np.stack(jax.tree.leaves(tree))


def _poison(n_bytes: int) -> None:
    """Fills free memory with NaN, which the next arrays are put in."""
    jax.block_until_ready(jnp.full(n_bytes // 4, jnp.nan))
