"""What `benchmarks.gpu` measures, a generator of rows for each part.

A row has a name, and what was found: ``median_s``, ``of_reference`` (the median over rounds of its
time over that of the first row of its part), ``distance`` to what it should be.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from benchmarks import parity, products, symmetric_kernel, timing, training_step, trees
from benchmarks.compiled import Update
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.presets import PRESETS
from examples.trainer.settings.run import RunConfig
from optax_muonplus.run import stacks

Row = dict[str, Any]
TINY = trees.Size(16, 1, 40, gated=False)
MOST_LAYERS = 12  # GPT-Small's
REPEATED = 50  # runs of the kernel, of which each must give the same bits


class Method(NamedTuple):
    """How products are computed: `compute_dtype`, and the precision of float32 products."""

    dtype: str | None = None
    precision: str | None = None


METHODS = {
    "bfloat16": Method("bfloat16"),
    "float16": Method("float16"),
    "TF32": Method(precision="tensorfloat32"),
    "X3": Method(precision="BF16_BF16_F32_X3"),  # three products of bfloat16
    "float32": Method(precision="highest"),
}


def rows(part: str, toy: bool, rounds: int, calls: int) -> Iterator[Row]:
    """Makes the rows of a part."""
    timed = functools.partial(timing.interleaved, rounds=rounds, calls=calls)
    if part == "kernel":
        return kernel(64 if toy else 2048, timed)
    if part == "step":
        return step(toy)
    if part == "stacks":
        return stack_bounds(TINY if toy else trees.SIZES["gpt-small"], timed)
    if part == "numbers":
        return numbers((8, 21) if toy else (1024, 2735), TINY if toy else trees.SIZES["gpt-small"])
    size = trees.SIZES[part]  # Optax's update of 24 layers would compile for minutes
    return updates(TINY if toy else size._replace(layers=min(size.layers, MOST_LAYERS)), timed)


def has_gpu() -> bool:
    """Tells whether JAX computes on a GPU."""
    return jax.default_backend() == "gpu"


def row_of(name: str, figures: Row, seconds: np.ndarray, reference: np.ndarray) -> Row:
    """Makes a row of a program that was timed, and of what is known of it."""
    row = {"name": name, **figures, **timing.median_and_quartiles(seconds)}
    row["of_reference"] = float(np.median(seconds / reference))
    if "tflop" in row:
        row["tflop_per_s"] = row["tflop"] / row["median_s"]
    return row


def updates(size: trees.Size, timed: Callable[..., Any]) -> Iterator[Row]:
    """Times whole updates, each in turn with Optax's, in bfloat16, in which Optax multiplies."""
    shapes = trees.shapes(size, dtype=jnp.bfloat16)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    where: dict[str, Any] = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
    make = functools.partial(omp.muonplus, 0.02, **parity.AS_OPTAX, **where)
    rules: dict[str, tuple[Any, str | None]] = {
        "omp.muonplus, bfloat16": (make(compute_dtype="bfloat16"), "bfloat16"),
        "omp.muon, bfloat16": (make(norm="none", compute_dtype="bfloat16"), "bfloat16"),
        "omp.muonplus, float16": (make(compute_dtype="float16"), "float16"),
        "omp.muonplus, TF32": (make(), None),
    }
    optax_muon = Update(optax.contrib.muon(0.02, **where), params, grads)
    first, labels = optax_muon(), omp.partition_labels(shapes)
    plain: Any = "newton_schulz"
    flops = products.flops(products.needed(size, plain, "bfloat16"))
    figures = optax_muon.figures | {"tflop": flops / 1e12}
    for n, (name, (rule, dtype)) in enumerate(rules.items()):
        update = Update(rule, params, grads)
        own = update.figures | {
            "tflop": products.flops(products.needed(size, "auto", dtype)) / 1e12
        }
        if name.startswith("omp.muon,"):
            own["distance"] = parity.largest_difference(update(), first, labels)
        seconds = timed({"reference": optax_muon, name: update})
        if n == 0:
            reference = seconds["reference"]
            yield row_of("optax.contrib.muon", figures, reference, reference)
        yield row_of(name, own, seconds[name], seconds["reference"])


def stack_bounds(size: trees.Size, timed: Callable[..., Any]) -> Iterator[Row]:
    """Times updates whose stacks of matrices have other sizes, each in turn with the default."""
    shapes = trees.shapes(size, dtype=jnp.bfloat16)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    rule = omp.muonplus(0.02, compute_dtype="bfloat16")
    reference = Update(rule, params, grads)
    for mib in (8, 32, 64, 256, 1024):
        with mock.patch.object(stacks, "STACK_BYTES", mib * 2**20):
            update = Update(rule, params, grads)
        name = f"{mib} MiB, not {stacks.STACK_BYTES >> 20}"
        seconds = timed({"reference": reference, name: update})
        yield row_of(name, update.figures, seconds[name], seconds["reference"])


def kernel(n: int, timed: Callable[..., Any]) -> Iterator[Row]:
    """Times the polar factor of a matrix (n, 2n) by the kernel, and counts different results."""
    x = {"weight": jax.random.normal(jax.random.key(0), (n, 2 * n))}
    factor = omp.polar.Orthogonalize(compute_dtype="bfloat16", polar="newton_schulz")
    functions = {"plain": factor, "one triangle": symmetric_kernel.OneTriangle(factor)}
    programs: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        chain = omp.matrix_chain(function)
        update = jax.jit(lambda g, chain=chain: chain.update(g, chain.init(g))[0])
        programs[name] = functools.partial(update, x)
    results = []
    for _ in range(REPEATED):
        jax.block_until_ready(jnp.full(4 * n * n, jnp.nan))  # free memory that the next call takes
        results.append(np.asarray(programs["one triangle"]()["weight"]))
    expected = programs["plain"]()["weight"]
    shapes = collections.Counter(omp.polar.matmul_shapes((n, 2 * n), factor))
    work = {"tflop": products.flops(shapes) / 1e12}
    ours = {
        "different_results": len({x.tobytes() for x in results}),
        "distance": max(parity.distance(x, expected) for x in results),
    }
    seconds = timed(programs)
    for name, figures in (("plain", work), ("one triangle", work | ours)):
        yield row_of(name, figures, seconds[name], seconds["plain"])


def step(toy: bool) -> Iterator[Row]:
    """Times a step of the trainer for GPT-Small with each optimizer, and the reading of text."""
    tiny = ModelConfig(n_layer=1, n_head=2, d_model=16, context=16)
    model = tiny if toy else PRESETS["gpt-small"][1].model
    vocabulary, tokens = (300, 128) if toy else (50_257, 16 * 2048)
    # Each in turn in one call: forward and backward passes of two calls were 3% apart.
    found = training_step.measure(RunConfig(model=model), vocabulary, tokens, 3, 5)
    alone = found["forward_and_backward_s"]
    yield {"name": "forward and backward", "median_s": alone, "of_reference": 1.0}
    yield {"name": "text read ahead", **found["tokens_per_second"]}
    for name in training_step.NAMES:
        yield {"name": name, "of_reference": found[name]["median_s"] / alone, **found[name]}


def numbers(shape: tuple[int, int], size: trees.Size) -> Iterator[Row]:
    """Compares an update in float32 with Optax's, and polar factors with float64."""
    grads = trees.random_like(trees.shapes(size._replace(layers=1)))
    where: dict[str, Any] = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(grads)}
    theirs = first_update(optax.contrib.muon(0.01, **where), grads, "highest")
    labels = omp.partition_labels(grads)
    for polar in ("newton_schulz", "gram"):
        rule = omp.muon(0.01, polar=polar, **parity.AS_OPTAX, **where)
        apart = parity.largest_difference(first_update(rule, grads, "highest"), theirs, labels)
        yield {"name": f"update as Optax's, {polar}", "distance": apart}
    matrices = spectra(shape)
    tree = {name: {"weight": jnp.asarray(x, jnp.float32)} for name, x in matrices.items()}
    tables, forms = ("jordan", "polar_express"), ("newton_schulz", "gram")
    for table, form, name in itertools.product(tables, forms, METHODS):
        method = METHODS[name]
        try:
            factor = omp.polar.Orthogonalize(table, 5, polar=form, compute_dtype=method.dtype)
        except ValueError as error:  # the library refuses what diverges in this precision
            yield {"name": f"{table}, {form}, {name}", "refused": str(error)}
            continue
        found = first_update(omp.matrix_chain(factor), tree, method.precision)
        apart = {
            kind: parity.distance(x["weight"], polynomial(matrices[kind], table, 5))
            for kind, x in found.items()
        }
        yield {
            "name": f"{table}, {form}, {name}",
            "distance": apart["gaussian"],
            "distances": apart,
        }


def first_update(rule: Any, grads: Any, precision: str | None) -> Any:
    """Computes the first update of a rule, with float32 products in a precision."""
    with jax.default_matmul_precision(precision or "default"):
        return jax.jit(lambda g: rule.update(g, rule.init(g), g)[0])(grads)


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
    found, _, safety_factor, *_ = omp.coefficients.for_steps(table, n)
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    return (u * omp.coefficients.evaluate(found, s / (safety_factor * np.linalg.norm(s)))) @ vh
