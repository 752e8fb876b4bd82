"""How exact polar factors and updates are on a GPU: against float64, the CPU and Optax."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from benchmarks import parity, trees

Figures = dict[str, Any]
Polar = Literal["auto", "newton_schulz", "gram"]
FORMS: tuple[Polar, ...] = ("newton_schulz", "gram")


class Method(NamedTuple):
    """How products are computed."""

    dtype: str | None = None
    """`compute_dtype`; None: float32."""
    precision: str | None = None
    """Of float32 products, for `jax.default_matmul_precision`; XLA's default on a GPU is TF32."""
    polar: Polar = "auto"


METHODS = {
    f"{name}, {polar}": Method(dtype, precision, polar)
    for name, dtype, precision in (
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", None),
        ("TF32", None, None),
        ("X3", None, "BF16_BF16_F32_X3"),  # three products of bfloat16
        ("float32", None, "highest"),
    )
    for polar in FORMS
}


def guarded(run: Callable[[], Figures]) -> Figures:
    """Returns what a step returns, or how it failed."""
    try:
        return run()
    except Exception as error:  # whatever it is, the next step is to run
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}


def spectra(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Makes a Gaussian matrix, one with singular values log-spaced to 1e-3, and one of low rank."""
    x = np.random.default_rng(0).standard_normal(shape)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    found = {
        "gaussian": x,
        "log-spaced": (u * np.logspace(0, -3, len(s))) @ vh,
        "low rank": (u * (np.arange(len(s)) < max(1, len(s) // 100))) @ vh,
    }
    return {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}


def polynomial(x: np.ndarray, table: str, n: int) -> np.ndarray:
    """Computes the iteration's polynomial of each singular value, in float64."""
    rows, _, safety_factor, *_ = omp.coefficients.for_steps(table, n)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    return (u * omp.coefficients.evaluate(rows, s / (safety_factor * np.linalg.norm(s)))) @ vh


def polar_factors(
    table: str, n: int, shape: tuple[int, int], methods: dict[str, Method]
) -> Figures:
    """Measures distances to the float64 polynomial, of each method, on this device and the CPU."""
    matrices = spectra(shape)
    tree = {name: {"weight": jnp.asarray(x, jnp.float32)} for name, x in matrices.items()}

    def measured(method: Method) -> Figures:
        polar: dict[str, Any] = {"ns_coeffs": table, "ns_steps": n, "polar": method.polar}
        rule = omp.muon(
            1.0, beta=0.0, nesterov=False, shape_scale="none", compute_dtype=method.dtype, **polar
        )
        return {
            where: {
                name: parity.distance(-x["weight"], polynomial(matrices[name], table, n))
                for name, x in update_on(device, rule, tree, method.precision).items()
            }
            for where, device in devices().items()
        }

    return {name: guarded(functools.partial(measured, method)) for name, method in methods.items()}


def devices() -> dict[str, jax.Device]:
    """Finds this machine's first device, and a CPU where JAX has one too."""
    found = {"device": jax.devices()[0]}
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves it out
        found["cpu"] = jax.devices("cpu")[0]
    return found


def products_in(precision: str | None) -> contextlib.AbstractContextManager[None]:
    """Has float32 products in that precision; None leaves it to XLA."""
    return jax.default_matmul_precision(precision) if precision else contextlib.nullcontext()


def update_on(
    device: jax.Device, rule: optax.GradientTransformation, grads: Any, precision: str | None
) -> Any:
    """Computes the first update of a rule on a device."""
    grads = jax.device_put(grads, device)
    with products_in(precision):
        return jax.jit(lambda g: rule.update(g, rule.init(g), g)[0])(grads)


def against_the_cpu(size: trees.Size, methods: dict[str, Method]) -> Figures:
    """Measures distances of whole updates to those of float32 products on a CPU."""
    grads = trees.random_like(trees.shapes(size))
    labels, found = omp.partition_labels(grads), {}
    exact = update_on(jax.devices("cpu")[0], omp.muonplus(0.01), grads, "highest")
    for name, method in methods.items():
        rule = omp.muonplus(0.01, compute_dtype=method.dtype, polar=method.polar)
        update = update_on(jax.devices()[0], rule, grads, method.precision)
        found[name] = parity.largest_difference(update, exact, labels)
    return found


def against_optax(size: trees.Size) -> Figures:
    """Measures distances of an update to Optax's, in float32."""
    grads = trees.random_like(trees.shapes(size))
    dims: Any = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(grads)}
    on_device = functools.partial(update_on, jax.devices()[0], grads=grads, precision="highest")
    theirs, labels = on_device(optax.contrib.muon(0.01, **dims)), omp.partition_labels(grads)
    ours = {
        polar: on_device(omp.muon(0.01, polar=polar, **parity.AS_OPTAX, **dims)) for polar in FORMS
    }
    return {polar: parity.largest_difference(x, theirs, labels) for polar, x in ours.items()}


def symmetric_kernel(n: int) -> Figures:
    """Compares updates by the experimental kernel with each other and with those without it."""
    kernel = importlib.import_module("benchmarks.symmetric_kernel")
    x = {"weight": jax.random.normal(jax.random.key(0), (n, 2 * n))}
    factor = omp.polar.Orthogonalize(compute_dtype="bfloat16", polar="newton_schulz")
    plain, ours = (
        omp.transforms.apply_to_matrices([function])
        for function in (factor, kernel.OneTriangle(factor))
    )
    update = jax.jit(lambda g: ours.update(g, ours.init(g))[0])
    found = []
    for _ in range(50):
        jax.block_until_ready(jnp.full(4 * n * n, jnp.nan))  # free memory that the next call takes
        found.append(np.asarray(update(x)["weight"]))
    expected = jax.jit(lambda g: plain.update(g, plain.init(g))[0])(x)["weight"]
    return {
        "different_results": len({x.tobytes() for x in found}),
        "distance_to_plain": max(parity.distance(x, expected) for x in found),
    }
